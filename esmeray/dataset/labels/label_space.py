"""The names that labels have, and the numbers that a model knows them by.

``label_mappings.json`` travels with every model so that its outputs can be named again.

Shape legend: N records, R residues of all records end to end, C outputs or labels, L levels of nested labels.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError, parsing, read_json
from esmeray.common.text import counted
from esmeray.common.verification import verified
from esmeray.dataset.section import LabelsSection, TargetKind
from esmeray.dataset.targets import IGNORED_TARGET, SparseTargets

MAPPINGS_FILE = "label_mappings.json"

DECISION_THRESHOLD = 0.5
"""A label of several is predicted where its probability is above this."""

UNKNOWN_LETTERS = LabelsSection().unknown_letters
"""Default, if no setting says otherwise."""

Labels = Sequence[str] | Sequence[Sequence[str]] | np.ndarray
"""Class names or strings of letters, lists of class names, or (N, C) numbers with NaN where one is not known."""

_SHOWN = 8


def predicted_positive(probabilities: Any) -> Any:
    """True for each label of several that is predicted, as an array or tensor in the shape of its probabilities."""
    return probabilities > DECISION_THRESHOLD


class UnseenLabelError(DataError):
    """A label that the label space does not hold, and the index of its record among those that were given."""

    def __init__(self, message: str, label: str = "", index: int = -1) -> None:
        super().__init__(message)
        self.label, self.index = label, index

    @classmethod
    def of(cls, label: str, index: int, names: Sequence[str]) -> "UnseenLabelError":
        return cls(f"record {index}: the label {label!r} is not among {_shortened(names)}", label, index)


@dataclass(frozen=True)
class LabelSpace:
    """The meaning of a model's outputs.

    Attributes:
        kind: what a target is.
        names: classes sorted by name (of two, the second is the positive one); columns of regression, or of multilabel
            targets with a column for each class, in the order of the settings; letters of per-residue labels.
    """

    kind: TargetKind
    names: tuple[str, ...]

    @property
    def num_outputs(self) -> int:
        """C: numbers that the model gives for a record, or for a residue."""
        return len(self.names)

    @classmethod
    def of(
        cls, labels: Labels, kind: TargetKind, columns: Sequence[str], unknown_letters: str = UNKNOWN_LETTERS
    ) -> "LabelSpace":
        """The label space of training records; ``columns`` are those that (N, C) numbers were read from, and
        ``unknown_letters`` of residues that are not known are no classes.

        Raises DataError for fewer than two classes, more than two of a binary kind, classes that are decimal numbers,
        or a column without a number.
        """
        if isinstance(labels, np.ndarray):
            for column, values_N in zip(columns, labels.T, strict=True):
                if np.isnan(values_N).all():
                    raise DataError(
                        f"column {column!r} has no number in any of {counted(len(labels), 'training record{s}')}"
                    )
            return cls(kind, tuple(columns))
        # Of several labels the names in each list, of residues the letters in each string.
        distinct = set(map(str, labels)) if kind in ("multiclass", "binary") else set().union(*labels)
        if kind == "per_residue":
            distinct -= set(unknown_letters)
        # By name, so that the same classes have the same numbers whatever the order of the records.
        names = tuple(sorted(distinct))
        if len(names) < 2:
            what = f"is {names[0]!r} in every one" if names else "is missing in every one"
            what += (
                f" (data.labels.unknown_letters {unknown_letters!r} mean not known)" if kind == "per_residue" else ""
            )
            raise DataError(
                f"the label {what} of {counted(len(labels), 'training record{s}')}, so there is nothing to learn: "
                "give records of at least two classes, or look whether data.labels names the right place"
            )
        check_names(names, kind)
        if kind == "binary" and len(names) > 2:
            raise DataError(
                f"{len(names)} classes where data.labels.kind binary takes two ({_shortened(names)}): "
                "set data.labels.kind to multiclass"
            )
        return cls(kind, names)

    def encode(
        self, labels: Labels, *, ignore_unseen: bool = False, unknown_letters: str = UNKNOWN_LETTERS
    ) -> NDArray | SparseTargets:
        """Targets of labels of the kind.

        multiclass, binary: (N,) int64. multilabel: (N, C) float32 of 0 and 1, sparse of lists of names. regression:
        (N, C) float32. per_residue: (R,) int64. Not known is :data:`IGNORED_TARGET` among classes, NaN among numbers. A
        label that is not in the label space raises UnseenLabelError, or with ``ignore_unseen`` makes the record (or
        residue) not known.
        """
        if isinstance(labels, np.ndarray):
            return np.ascontiguousarray(labels, dtype=np.float32)
        if self.kind == "per_residue":
            return self._encode_letters([str(letters) for letters in labels], ignore_unseen, unknown_letters)
        if self.kind == "multilabel":
            return self._encode_sets(labels, ignore_unseen)
        codes = {name: code for code, name in enumerate(self.names)}
        targets = [codes.get(str(name), IGNORED_TARGET) for name in labels]
        if IGNORED_TARGET in targets and not ignore_unseen:
            index = targets.index(IGNORED_TARGET)
            raise UnseenLabelError.of(str(labels[index]), index, self.names)
        return np.array(targets, dtype=np.int64)

    def __str__(self) -> str:
        """Kind, number and names in a line: thousands of classes say that labels are ids or numbers to measure by."""
        noun = "column{s}" if self.kind == "regression" else "class{es}"
        return f"{self.kind}, {counted(self.num_outputs, noun)} ({_shortened(self.names)})"

    def save(self, folder: Path) -> None:
        text = json.dumps(self._mappings(), indent=1, ensure_ascii=False) + "\n"
        (folder / MAPPINGS_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "LabelSpace":
        """The label space that :meth:`save` wrote; raises DataError where the file is missing or damaged."""
        path = folder / MAPPINGS_FILE
        remedy = "make it or copy it again: it names the classes of the labels"
        content = read_json(verified(path), remedy)
        with parsing(path, remedy):
            codes = content["label2id"]
            space = cls(content["kind"], tuple(sorted(codes, key=codes.__getitem__)))
            # Both mappings are for other programs; where they differ, one of them would name outputs wrongly.
            if space.kind not in get_args(TargetKind) or space._mappings() != content:
                raise ValueError("its kind or its two mappings do not hold")
        return space

    def _mappings(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "id2label": {str(code): name for code, name in enumerate(self.names)},
            "label2id": {name: code for code, name in enumerate(self.names)},
        }

    def _encode_sets(self, labels: Sequence[Sequence[str]], ignore_unseen: bool) -> SparseTargets:
        codes = {name: code for code, name in enumerate(self.names)}
        unknown_N1 = np.zeros((len(labels), 1), dtype=np.bool_)
        starts = [0]
        indices: list[int] = []
        for index, names in enumerate(labels):
            unseen = [name for name in names if name not in codes]
            if unseen and not ignore_unseen:
                raise UnseenLabelError.of(unseen[0], index, self.names)
            # Not just that name: without it, the record would say that the others are all that it has.
            unknown_N1[index] = bool(unseen)
            indices += [] if unseen else sorted({codes[name] for name in names})
            starts.append(len(indices))
        groups_C = np.zeros(self.num_outputs, dtype=np.int64)  # one: all labels of a record are known, or none
        return SparseTargets(np.array(starts, dtype=np.int64), np.array(indices, dtype=np.int32), unknown_N1, groups_C)

    def _encode_letters(self, labels: list[str], ignore_unseen: bool, unknown_letters: str) -> NDArray[np.int64]:
        # All residues at once: a store may have hundreds of millions, and a dictionary would take minutes.
        points_R = _code_points("".join(labels))
        names_C = _code_points("".join(self.names))  # sorted: names are, and Python sorts letters by code point
        nearest_R = np.minimum(np.searchsorted(names_C, points_R), len(names_C) - 1)
        known_R = names_C[nearest_R] == points_R
        unseen_R = ~known_R & ~np.isin(points_R, _code_points(unknown_letters))
        if unseen_R.any() and not ignore_unseen:
            at = int(np.argmax(unseen_R))
            ends_N = np.cumsum(list(map(len, labels)))
            raise UnseenLabelError.of(chr(points_R[at]), int(ends_N.searchsorted(at, side="right")), self.names)
        return np.where(known_R, nearest_R, IGNORED_TARGET).astype(np.int64)


def _code_points(text: str) -> NDArray[np.uint32]:
    """(R,) uint32: the Unicode code point of each letter."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def check_names(names: Sequence[str], kind: TargetKind) -> None:
    """Raise DataError for names that are numbers, not all of them whole: 1.0 may be a class, 0.37 was measured."""
    try:
        values = [float(name.replace(",", ".")) for name in names]  # decimals of spreadsheets, too
    except ValueError:  # a name
        return
    if any(math.isfinite(value) and not value.is_integer() for value in values):
        raise DataError(
            f"{counted(len(names), 'class{es}')} of data.labels.kind {kind} are decimal numbers ({_shortened(names)}): "
            "set data.labels.kind to regression; if they are names, write them with a letter, as EC1.1"
        )


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def level_ids(labels: Sequence[str], levels: int) -> NDArray[np.int64]:
    """(C, L) number of the group of each label at each level; IGNORED_TARGET where it has no such level.

    A label a.b.c is of the group a.b.c at level 0, of a.b at level 1, of a at level 2.
    """
    ids_CL = np.full((len(labels), levels), IGNORED_TARGET, dtype=np.int64)
    for level in range(levels):
        known = [index for index, label in enumerate(labels) if label and label.count(".") >= level]
        shortened = [labels[index].rsplit(".", level)[0] for index in known]
        ids_CL[known, level] = np.unique(shortened, return_inverse=True)[1]
    return ids_CL
