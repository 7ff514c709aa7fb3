"""Read labelled files (FASTA, CSV, TSV, Parquet) into memory: ids, texts, labels and held-out parts.

Records of a table without an id column are named row1, row2 ...

Shape legend: N records, C label columns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.progress import ProgressCallback, no_progress
from esmeray.common.text import counted
from esmeray.dataset.fasta.counts import IngestCounts, SourceFile
from esmeray.dataset.fasta.reader import files_ignored, find_files, is_fasta_name
from esmeray.dataset.labels.parts import (
    LabelledPart,
    LabelledSource,
    ResidueLabels,
    header_pattern,
    place_in_file,
)
from esmeray.dataset.labels.values import Label, SeparatedNames, group, label_reader, split_part
from esmeray.dataset.section import IngestSection, LabelsSection, SampleSection, TokenizerSection
from esmeray.dataset.store.conversion import SAMPLE, sample_source
from esmeray.dataset.store.format import SampleSource
from esmeray.dataset.store.ingest import CleanBlock, Ingest
from esmeray.dataset.table import is_table_name


class LabelledCounts(IngestCounts):
    """Counts of what reading, splitting and encoding changed or left out, and of the records that remain."""

    records_skipped_missing_label: int = Field(default=0, description="record{s} without a label skipped")
    labels_without_sequence: int = Field(default=0, description="label{s} without a sequence ignored")
    label_values_missing: int = Field(default=0, description="missing number{s} in records that have other numbers")
    records_unseen_label: int = Field(
        default=0, description="held-out record{s} skipped because their label does not occur in training"
    )
    residues_not_known: dict[str, int] = Field(
        default={},
        description="residue{s} with an unknown label, ignored in training and metrics (data.labels.unknown_letters)",
    )
    held_out_by_validation: int = Field(
        default=0, description="training record{s} moved to validation because column 'validation' is true, as in FLIP"
    )
    residues_unseen_label: int = Field(
        default=0, description="held-out residue{s} ignored in metrics because their label does not occur in training"
    )
    held_out_also_in_training: int = Field(
        default=0, description="held-out record{s} whose sequence is also in training, which inflates the metrics"
    )
    training: int = 0
    validation: int = 0
    test: int = 0


@dataclass(frozen=True)
class LabelledRecords:
    """N records in the order of their files.

    Attributes:
        texts: sequences in the letters of the store's alphabet, or texts as they are in the file.
        labels: names; lists of names; strings of letters, as long as their sequence; (N, C) float32 with NaN for a
            missing number.
        parts: training, validation or test, per record, or None.
        groups: name of each record's group, which a split keeps together, or None.
        held_out_source: the files that are held out as validation.
        labels_source: the files that hold only labels and masks.
        doubt: reason why the labels seem misread and must not be trained on, or None. It does not apply to a trained
            model, which knows its own names.
        origins: each record's file and its number in the file, from 1; None for records of the sample.
    """

    ids: list[str]
    texts: list[str]
    labels: list[str] | list[list[str]] | NDArray[np.float32]
    parts: list[str] | None
    counts: LabelledCounts
    source: list[SourceFile] | SampleSource
    held_out_source: list[SourceFile]
    labels_source: list[SourceFile]
    origins: list[tuple[Path, int] | None]
    groups: list[str] | None = None
    doubt: str | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def place(self, index: int) -> str:
        """Return id, file and row (or line) of a record, for a message."""
        origin = self.origins[index]
        where = f" ({place_in_file(*origin)})" if origin else ""
        return f"record {self.ids[index]!r}{where}"


def read_labelled(
    sources: list[str],
    labels: LabelsSection,
    tokenizer: TokenizerSection,
    ingest: IngestSection,
    *,
    held_out_sources: Sequence[str] = (),
    sample: SampleSection | None = None,
    progress: ProgressCallback = no_progress,
) -> LabelledRecords:
    """Read labelled files.

    ``sources`` are files, folders and globs: tables are recognized by suffix, all other files are read as FASTA. Or
    'sample' for an embedded sample, of proteins or texts according to ``tokenizer.content``. Records of
    ``held_out_sources`` are validation.

    Raises DataError if a file or record is refused or no record is left; ConfigError if settings conflict with each
    other or with the files.
    """
    check_label_settings(labels, tokenizer)
    embedded = (sample or SampleSection()) if sources == [SAMPLE] else None
    paths = [] if embedded else find_labelled_files(sources)
    held_out = find_labelled_files(held_out_sources)
    counts = LabelledCounts()  # shared by all readers, for one report
    # Read in full first, because sequences look up their labels by id, in an order of their own.
    residue_labels = None
    if labels.labels_file is not None:
        residue_labels = ResidueLabels(labels.labels_file, labels, counts)
    # Held-out files come last in the same source, because ids must be unique across all files.
    source = LabelledSource(
        paths + held_out,
        labels,
        tokenizer.content,
        with_labels=True,
        sample=embedded,
        residue_labels=residue_labels,
    )
    reader = _Reader(Ingest(ingest, source.places, content=tokenizer.content, counts=counts), labels, counts)
    reader.read(source, len(paths), progress)
    if not reader.ids:
        left_out = "; ".join(counts.lines())
        raise DataError(f"no records left after data.ingest and data.labels were applied: {left_out}")
    reader.counts.files_ignored = files_ignored([*sources, *held_out_sources], is_labelled_name)
    # Here every sequence has looked up its labels.
    if residue_labels is not None:
        reader.counts.labels_without_sequence = residue_labels.count_without_sequence()
    has_parts = bool(held_out) or labels.split_column is not None
    values: Any = reader.labels
    if isinstance(reader.labels[0], tuple):
        values = np.array(reader.labels, dtype=np.float32)
    return LabelledRecords(
        ids=reader.ids,
        texts=reader.texts,
        labels=values,
        parts=reader.parts if has_parts else None,
        counts=reader.counts,
        source=sample_source(embedded) if embedded else source.finished[: len(paths)],
        held_out_source=source.finished[len(paths) :],
        labels_source=residue_labels.files if residue_labels else [],
        origins=reader.origins,
        groups=reader.groups or None,
        doubt=reader.label.doubt() if isinstance(reader.label, SeparatedNames) else None,
    )


def check_label_settings(labels: LabelsSection, tokenizer: TokenizerSection) -> None:
    """Raise ConfigError for settings that are wrong for all files."""
    if labels.header_pattern is not None:
        header_pattern(labels)
    if labels.kind == "per_residue" and tokenizer.content != "protein":
        raise ConfigError(
            "data.labels.kind per_residue needs model.tokenizer.content protein: texts have no residues to label"
        )
    if labels.split == "clusters" and tokenizer.content != "protein":
        raise ConfigError(
            "data.labels.split clusters needs model.tokenizer.content protein: texts have no residues to align"
        )


def find_labelled_files(sources: Sequence[str]) -> list[Path]:
    """Find FASTA files and tables; see :func:`~esmeray.dataset.fasta.reader.find_files`."""
    return find_files(sources, is_labelled_name, "FASTA file or table")


def is_labelled_name(path: Path) -> bool:
    return is_table_name(path) or is_fasta_name(path)


class _Reader:
    """Collects the kept records: ids, texts, labels, parts and origins."""

    def __init__(self, ingest: Ingest, settings: LabelsSection, counts: LabelledCounts) -> None:
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.labels: list[Label] = []
        self.parts: list[str] = []
        self.groups: list[str] = []
        self.origins: list[tuple[Path, int] | None] = []
        self._ingest = ingest
        self.counts = counts
        self._settings = settings
        self.label = label_reader(settings)

    def read(self, source: LabelledSource, num_training: int, progress: ProgressCallback) -> None:
        """Read the source, whose first ``num_training`` files are not held out."""
        bytes_total = source.bytes_total
        for file, taken, block in source.cleaned(self._ingest):
            if block is not None:
                self._take(taken, block, "training" if file < num_training else "validation")
            # Limited, because a file may grow while it is read.
            bytes_read = min(source.bytes_read, bytes_total)
            progress(bytes_read, bytes_total, self.counts.records_read)
        progress(bytes_total, bytes_total, self.counts.records_read)

    def _take(self, taken: LabelledPart, block: CleanBlock, part_of_file: str) -> None:
        kept = range(len(taken.batch)) if block.kept is None else block.kept.tolist()
        # Labels of dropped records are not validated: they may be as bad as their sequences.
        for index, record_id, text in zip(kept, block.ids.split(), block.texts(), strict=True):
            label = self._label_of(taken, taken.labels[index], index, len(text))
            if label is None:
                continue
            self.labels.append(label)
            self._take_columns(taken, index, part_of_file)
            self.ids.append(record_id.decode("utf-8"))
            self.texts.append(text)
            self.origins.append(taken.batch.origin(index))

    def _take_columns(self, taken: LabelledPart, index: int, part_of_file: str) -> None:
        try:
            if taken.groups is not None:
                self.groups.append(group(taken.groups[index]))
            name = part_of_file if taken.splits is None else split_part(*taken.splits[index])
            self.parts.append(name)
            self.counts.held_out_by_validation += taken.splits is not None and name != split_part(
                taken.splits[index][0]
            )
        except ValueError as error:
            # Read on after the fault. The lists differ in length from here on, but they are discarded at the end.
            self._ingest.faults.add("record{s} with an invalid split or group", taken.batch, index, str(error))

    def _label_of(self, taken: LabelledPart, values: Sequence[Any], index: int, length: int) -> Label | None:
        """Return a record's label, or None to leave it out. Per-residue labels are as long as the sequence."""
        try:
            label = self.label(values)
        except ValueError as error:
            self._ingest.faults.add("invalid label{s}", taken.batch, index, str(error))
            return None
        if label is None:
            self._without_label(taken, index, taken.missing(index))
            return None
        # If only some numbers are missing, the record is kept, and the missing ones are left out of the loss.
        if isinstance(label, tuple) and any(map(math.isnan, label)):
            lacking = [name for name, value in zip(self._settings.label_columns, label, strict=True) if value != value]
            if self._settings.missing_labels == "error":
                self._without_label(taken, index, f"label missing in column {', '.join(map(repr, lacking))}")
            self.counts.label_values_missing += len(lacking)
        if isinstance(label, str) and self._settings.kind == "per_residue" and length:
            return self._letters_of(taken, index, label, length)
        return label

    def _letters_of(self, taken: LabelledPart, index: int, letters: str, length: int) -> str | None:
        """Return one letter per residue; None if there are too many or too few."""
        if len(letters) != taken.batch.records.lengths[index]:
            letters = letters.strip()
        if len(letters) == taken.batch.records.lengths[index] == length + 1:
            return letters[:-1]  # drop the letter of the final '*', which was dropped and counted
        if len(letters) == length:
            return letters
        where = "" if self._settings.labels_file is None else f" in {self._settings.labels_file}"
        self._ingest.faults.add(
            "record{s} with too few or too many labels",
            taken.batch,
            index,
            f"{counted(len(letters), 'label{s}')}{where} for {counted(length, 'residue{s}')}; give one letter "
            f"per residue (if unknown, one of data.labels.unknown_letters, {self._settings.unknown_letters!r})",
        )
        return None

    def _without_label(self, taken: LabelledPart, index: int, problem: str) -> None:
        """Refuse or count a record without a label, or with one of several missing."""
        if self._settings.missing_labels == "error":
            problem += "; complete or remove the record, or give --data.labels.missing_labels skip"
            self._ingest.faults.add("record{s} without a label", taken.batch, index, problem)
            return
        self.counts.records_skipped_missing_label += 1
