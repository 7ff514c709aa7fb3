"""Labelled records for probes: the kind of task, told by the labels, and the rows to fit.

Shape legend: N records, R rows (records, or residues of all of them).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import ConfigError
from esmeray.common.text import counted
from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.dataset.labels.labelled_file import LabelledRecords, read_labelled
from esmeray.dataset.labels.values import number
from esmeray.dataset.section import DataSection, LabelsSection, TargetKind, TokenizerSection
from esmeray.dataset.targets import has_target
from esmeray.inference.layers.section import LayersSection

SAMPLED_RESIDUES = 20_000
"""Maximum number of residues to fit and score; more residues change the choice little and take minutes per layer."""
_CLASS_SIZE = 5
"""Minimum mean number of records per class. Classes with fewer are probably ids or families."""
_WHOLE_NUMBERS = 20
"""Minimum number of distinct whole numbers that are measurements; fewer may be classes."""


@dataclass(frozen=True)
class LabelledRows:
    """Rows that probes learn and predict.

    Attributes:
        kind: regression, per_residue, or a kind of classes.
        targets: (R,) numbers, or class numbers.
        records: (R,) record of each row, ascending.
        offsets: (R,) residue of each row in its record; 0 for rows of whole records.
        groups: (R,) group of each row, which no fold splits.
        training: (R,) true for rows of the training part; None if the table has no split.
        notes: lines about what was changed or sampled.
    """

    kind: TargetKind
    targets: NDArray
    records: NDArray[np.int64]
    offsets: NDArray[np.int64]
    groups: NDArray[np.int64]
    training: NDArray[np.bool_] | None
    notes: list[str]


def read_task(section: LayersSection, data: DataSection, is_kind_given: bool) -> tuple[LabelledRecords, LabelSpace]:
    """Read the labelled files, with the kind of labels that the settings give or the labels tell.

    Raises ConfigError if the labels do not tell the kind, or for several labels per record; DataError for an invalid
    file, record or label, or a single class.
    """
    labels = data.labels
    if labels.kind == "multilabel" or len(labels.label_columns) > 1:
        raise ConfigError("data.labels: a layer is chosen by one label per record; give one column, and not multilabel")
    records = _read(section, data, labels)
    if not (is_kind_given or section.retrieval):
        kind = told_kind([str(label) for label in records.labels], records.texts)
        if kind != labels.kind:
            labels = labels.model_copy(update={"kind": kind})
            records = _read(section, data, labels)
    return records, LabelSpace.of(records.labels, labels.kind, labels.label_columns, labels.unknown_letters)


def rows_of(
    records: LabelledRecords, space: LabelSpace, unknown_letters: str, longest: int | None, seed: int
) -> LabelledRows:
    """Return the rows with a known target, sampled if they are residues; those beyond the model's maximum are left out.

    ``longest``: maximum residues of a sequence; None for no maximum.
    """
    targets_R = space.encode(records.labels, unknown_letters)[0][:].reshape(-1)
    lengths_N = np.array([len(text) if space.kind == "per_residue" else 1 for text in records.texts])
    records_R = np.repeat(np.arange(len(records)), lengths_N)
    offsets_R = np.arange(len(records_R)) - np.repeat(np.cumsum(lengths_N) - lengths_N, lengths_N)
    rows = np.flatnonzero(has_target(targets_R) & (offsets_R < (longest or np.inf)))
    notes = [f"{counted(len(records), 'record{s}')}: {space}", *records.counts.lines()]
    if space.kind == "per_residue" and len(rows) > SAMPLED_RESIDUES:
        notes.append(f"{SAMPLED_RESIDUES:,} of {len(rows):,} labelled residues sampled")
        rows = np.sort(np.random.default_rng(seed).choice(rows, SAMPLED_RESIDUES, replace=False))
    records_R = records_R[rows]
    # Without groups, equal sequences form one: a probe would otherwise be tested on what it has learnt.
    _, groups_N = np.unique(records.groups or records.texts, return_inverse=True)
    training_R = None if records.parts is None else np.array(records.parts)[records_R] == "training"
    return LabelledRows(space.kind, targets_R[rows], records_R, offsets_R[rows], groups_N[records_R], training_R, notes)


def told_kind(labels: Sequence[str], texts: Sequence[str]) -> TargetKind:
    """Return the kind of task that labels tell. Raises ConfigError if they may be of two kinds."""
    # Most of them, because a final '*' may have been removed; other lengths are refused by the reader.
    if np.mean([len(label) == len(text) for label, text in zip(labels, texts, strict=True)]) > 0.5:
        return "per_residue"
    distinct = set(labels)
    try:
        numbers = set(map(number, distinct))
    except ValueError:
        if len(distinct) * _CLASS_SIZE > len(labels):
            raise ConfigError(
                f"data.labels: {counted(len(distinct), 'distinct label{s}')} in {len(labels):,} records are too many "
                "classes; give --layers.retrieval true to compare nearest neighbours, or --data.labels.kind multiclass"
            ) from None
        return "multiclass"
    if len(numbers) < _WHOLE_NUMBERS and all(value.is_integer() for value in numbers):
        raise ConfigError(
            f"data.labels: {counted(len(numbers), 'distinct whole number{s}')} may be classes or measurements; give "
            "--data.labels.kind multiclass or regression"
        )
    return "regression"


def _read(section: LayersSection, data: DataSection, labels: LabelsSection) -> LabelledRecords:
    return read_labelled(
        section.input, labels, TokenizerSection(), data.ingest, held_out_sources=labels.validation_source
    )
