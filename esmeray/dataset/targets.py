"""Targets of records: labels as numbers, unknown ones included, and the label space that names a model's outputs.

Every model has a copy of ``label_mappings.json``, so that its outputs can be named. Targets are arrays or tensors;
nothing here imports torch.

Shape legend: T tokens, N records, R residues of all records, concatenated, C outputs or labels, L levels of nested
labels, G groups of labels, P pairs of a record and one of its labels.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError, parsing, read_json
from esmeray.common.publishing import verified
from esmeray.common.text import counted
from esmeray.dataset.section import LabelsSection, TargetKind

IGNORED_TARGET = -100
"""Class that losses ignore (PyTorch's ``ignore_index`` default)."""

MAPPINGS_FILE = "label_mappings.json"

UNKNOWN_LETTERS = LabelsSection().unknown_letters
"""Default letters of residues without a known label."""

Labels = Sequence[str] | Sequence[Sequence[str]] | np.ndarray
"""Class names or strings of letters, lists of class names, or (N, C) numbers with NaN for unknown ones."""

_SHOWN = 8


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


def predicted_positive(probabilities: Any) -> Any:
    """Return True for each predicted label of a multilabel target, in the shape of the probabilities."""
    return probabilities > 0.5


class UnseenLabel(NamedTuple):
    """A label that is not in the label space, and the index of its record in the input."""

    name: str
    record: int


@dataclass(frozen=True)
class LabelSpace:
    """The meaning of a model's outputs.

    Attributes:
        kind: kind of target.
        names: names of the outputs. Classes and per-residue letters are sorted; of two classes, the second is the
            positive one. Columns (regression, or multilabel with a column per class) have the order of the settings.
    """

    kind: TargetKind
    names: tuple[str, ...]

    @property
    def num_outputs(self) -> int:
        """C: number of outputs per record or residue."""
        return len(self.names)

    @classmethod
    def of(
        cls, labels: Labels, kind: TargetKind, columns: Sequence[str], unknown_letters: str = UNKNOWN_LETTERS
    ) -> "LabelSpace":
        """Build the label space of the training records.

        ``columns`` are the columns of (N, C) numbers. ``unknown_letters`` of residues don't become classes.

        Raises DataError for fewer than two classes, more than two of a binary kind, classes that are decimal numbers,
        or a column without a number.
        """
        if isinstance(labels, np.ndarray):
            for column, values_N in zip(columns, labels.T, strict=True):
                if np.isnan(values_N).all():
                    raise DataError(f"column {column!r} has no number in {counted(len(labels), 'training record{s}')}")
            return cls(kind, tuple(columns))
        # The names in each list for multilabel, the letters in each string for per_residue.
        distinct = set(map(str, labels)) if kind in ("multiclass", "binary") else set().union(*labels)
        if kind == "per_residue":
            distinct -= set(unknown_letters)
        # Sorted, so that numbers don't depend on the order of the records.
        names = tuple(sorted(distinct))
        if len(names) < 2:
            problem = f"is {names[0]!r}" if names else "is missing"
            raise DataError(
                f"the label {problem} in all {counted(len(labels), 'training record{s}')}, so there is nothing to "
                "learn: give records of at least two classes, or check that data.labels names the right column or "
                "field"
            )
        check_names(names, kind)
        if kind == "binary" and len(names) > 2:
            raise DataError(
                f"{len(names)} classes ({_shortened(names)}), but data.labels.kind binary needs two: set "
                "data.labels.kind to multiclass"
            )
        return cls(kind, names)

    def encode(
        self, labels: Labels, unknown_letters: str = UNKNOWN_LETTERS
    ) -> tuple[NDArray | SparseTargets, UnseenLabel | None]:
        """Encode labels as targets. Also return the first label that is not in the label space.

        multiclass, binary: (N,) int64. multilabel: (N, C) float32 of 0 and 1, sparse for lists of names. regression:
        (N, C) float32. per_residue: (R,) int64. Unknown targets are :data:`IGNORED_TARGET` (classes) or NaN (numbers).
        The target of a record (or residue) with an unseen label is unknown.
        """
        if isinstance(labels, np.ndarray):
            return np.ascontiguousarray(labels, dtype=np.float32), None
        if self.kind == "per_residue":
            return self._encode_letters([str(letters) for letters in labels], unknown_letters)
        if self.kind == "multilabel":
            return self._encode_sets(labels)
        codes = {name: code for code, name in enumerate(self.names)}
        targets = [codes.get(str(name), IGNORED_TARGET) for name in labels]
        unseen = None
        if IGNORED_TARGET in targets:
            index = targets.index(IGNORED_TARGET)
            unseen = UnseenLabel(str(labels[index]), index)
        return np.array(targets, dtype=np.int64), unseen

    def __str__(self) -> str:
        """Kind, number and names in a line. Thousands of classes suggest labels that are ids or measurements."""
        noun = "column{s}" if self.kind == "regression" else "class{es}"
        return f"{self.kind}, {counted(self.num_outputs, noun)} ({_shortened(self.names)})"

    def save(self, folder: Path) -> None:
        text = json.dumps(self._mappings(), indent=1, ensure_ascii=False) + "\n"
        (folder / MAPPINGS_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "LabelSpace":
        """Load the label space that :meth:`save` wrote; raises DataError if the file is missing or damaged."""
        path = folder / MAPPINGS_FILE
        remedy = "build or copy it again; it lists the label classes"
        content = read_json(verified(path), remedy)
        with parsing(path, remedy):
            codes = content["label2id"]
            space = cls(content["kind"], tuple(sorted(codes, key=codes.__getitem__)))
            # Other programs read either mapping, so they must agree.
            if space.kind not in get_args(TargetKind) or space._mappings() != content:
                raise ValueError("its kind is unknown, or its two mappings contradict each other")
        return space

    def _mappings(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "id2label": {str(code): name for code, name in enumerate(self.names)},
            "label2id": {name: code for code, name in enumerate(self.names)},
        }

    def _encode_sets(self, labels: Sequence[Sequence[str]]) -> tuple[SparseTargets, UnseenLabel | None]:
        codes = {name: code for code, name in enumerate(self.names)}
        unknown_N1 = np.zeros((len(labels), 1), dtype=np.bool_)
        starts = [0]
        indices: list[int] = []
        unseen = None
        for index, names in enumerate(labels):
            unseen_names = [name for name in names if name not in codes]
            # The whole record, not just the unseen name: otherwise the other names would count as all of its labels.
            if unseen_names:
                unseen = unseen or UnseenLabel(unseen_names[0], index)
                unknown_N1[index] = True
            else:
                indices += sorted({codes[name] for name in names})
            starts.append(len(indices))
        groups_C = np.zeros(self.num_outputs, dtype=np.int64)  # one group: a record's labels are all known or unknown
        targets = SparseTargets(np.array(starts, np.int64), np.array(indices, np.int32), unknown_N1, groups_C)
        return targets, unseen

    def _encode_letters(self, labels: list[str], unknown_letters: str) -> tuple[NDArray[np.int64], UnseenLabel | None]:
        # Vectorized: a store may have hundreds of millions of residues, and a loop would take minutes.
        points_R = _code_points("".join(labels))
        names_C = _code_points("".join(self.names))  # sorted, because names are, and Python sorts by code point
        nearest_R = np.minimum(np.searchsorted(names_C, points_R), len(names_C) - 1)
        known_R = names_C[nearest_R] == points_R
        unseen_R = np.flatnonzero(~known_R & ~np.isin(points_R, _code_points(unknown_letters)))
        unseen = None
        if unseen_R.size:
            ends_N = np.cumsum(list(map(len, labels)))
            record = int(ends_N.searchsorted(unseen_R[0], side="right"))
            unseen = UnseenLabel(chr(points_R[unseen_R[0]]), record)
        return np.where(known_R, nearest_R, IGNORED_TARGET).astype(np.int64), unseen


def _code_points(text: str) -> NDArray[np.uint32]:
    """Return (R,) uint32: the Unicode code point of each letter."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def check_names(names: Sequence[str], kind: TargetKind) -> None:
    """Raise DataError if all names are numbers and some are not integers: 1.0 may be a class, 0.37 is a measurement."""
    try:
        values = [float(name.replace(",", ".")) for name in names]  # also decimal commas of spreadsheets
    except ValueError:  # not a number
        return
    if any(math.isfinite(value) and not value.is_integer() for value in values):
        raise DataError(
            f"{counted(len(names), 'class{es}')} of data.labels.kind {kind} are decimal numbers "
            f"({_shortened(names)}): set data.labels.kind to regression; if they are names, add a letter, e.g. "
            "EC1.1"
        )


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def level_ids(labels: Sequence[str], levels: int) -> NDArray[np.int64]:
    """Return (C, L) the number of each label's group per level; IGNORED_TARGET if it has no such level.

    A label a.b.c belongs to the group a.b.c at level 0, a.b at level 1, and a at level 2.
    """
    ids_CL = np.full((len(labels), levels), IGNORED_TARGET, dtype=np.int64)
    for level in range(levels):
        known = [index for index, label in enumerate(labels) if label and label.count(".") >= level]
        shortened = [labels[index].rsplit(".", level)[0] for index in known]
        ids_CL[known, level] = np.unique(shortened, return_inverse=True)[1]
    return ids_CL
