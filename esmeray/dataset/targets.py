"""Targets of records, and those that are not known, in arrays and in tensors alike. Nothing here needs torch.

Shape legend: T tokens, N records, C labels, G groups of them, P pairs of a record and a label that it has.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORED_TARGET = -100
"""Class that no loss looks at (PyTorch's ``ignore_index`` default)."""


def has_target(targets: Any) -> Any:
    """(T,) or (N,) bool: the tokens or sequences of which a target is known; losses are divided by their count.

    ``targets``: classes, (T,) or (N,) integers; or (N, C) numbers, of which one or more in a row is not NaN.
    """
    # NaN alone differs from itself.
    return (targets == targets).any(-1) if targets.ndim == 2 else targets != IGNORED_TARGET


@dataclass(frozen=True, eq=False)
class SparseTargets:
    """(N, C) targets in compressed rows; indexed, rows as they would stand in an array of float32.

    Attributes:
        indptr: (N + 1,) int64, where the labels of each record begin in ``indices``, and where the last ones end.
        indices: (P,) int32, the labels of one record after the other.
        unknown: (N, G) bool, records of which no target of a group of labels is known.
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
        """(n, C) float32 of 0 and 1 of some records, NaN where unknown; by a slice, integers or a mask."""
        # Whatever NumPy takes as an index means the same here as for an array.
        records_N = np.arange(len(self.unknown))[records]
        targets_NC = np.zeros((records_N.size, len(self.groups)), dtype=np.float32)
        for row_C, start, end in zip(targets_NC, self.indptr[records_N], self.indptr[records_N + 1], strict=True):
            row_C[self.indices[start:end]] = 1
        # Last: the rows of these have no labels, which is not the same as having none known.
        targets_NC[self.unknown[records_N][:, self.groups]] = np.nan
        return targets_NC
