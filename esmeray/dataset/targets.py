"""Targets of records, including unknown ones, for arrays and tensors. Nothing here imports torch.

Shape legend: T tokens, N records, C labels, G groups of labels, P pairs of a record and one of its labels.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORED_TARGET = -100
"""Class that losses ignore (PyTorch's ``ignore_index`` default)."""


def has_target(targets: Any) -> Any:
    """Return (T,) or (N,) bool: the tokens or sequences with a known target. Losses are divided by their count.

    ``targets``: classes, (T,) or (N,) integers; or (N, C) numbers, known if at least one of the row is not NaN.
    """
    # Only NaN differs from itself. This works for arrays and tensors.
    return (targets == targets).any(-1) if targets.ndim == 2 else targets != IGNORED_TARGET


@dataclass(frozen=True, eq=False)
class SparseTargets:
    """(N, C) targets in compressed rows. Indexing returns dense rows of float32.

    Attributes:
        indptr: (N + 1,) int64, start of each record's labels in ``indices``, and the end.
        indices: (P,) int32, the labels of all records, concatenated.
        unknown: (N, G) bool, True if a record's targets in a group of labels are unknown.
        groups: (C,) int64, the group of each label.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    unknown: NDArray[np.bool_]
    groups: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, C)."""
        return len(self.unknown), len(self.groups)

    def __getitem__(self, records: slice | NDArray) -> NDArray:
        """Return (n, C) float32 of 0 and 1, NaN if unknown, for records selected by a slice, integers or a mask."""
        # Indexing a range supports all kinds of index that NumPy arrays do.
        records_N = np.arange(len(self.unknown))[records]
        targets_NC = np.zeros((records_N.size, len(self.groups)), dtype=np.float32)
        for row_C, start, end in zip(targets_NC, self.indptr[records_N], self.indptr[records_N + 1], strict=True):
            row_C[self.indices[start:end]] = 1
        # Last, because records with unknown targets have no labels, and their rows are 0 so far.
        targets_NC[self.unknown[records_N][:, self.groups]] = np.nan
        return targets_NC
