"""Labelled files to records in memory: ids, texts, labels, weights and who is held out, with every refusal placed.

In: FASTA, CSV, TSV or Parquet, and where in them labels stand. Out: :class:`LabelledRecords`, in the order of the
files. Files are read by :mod:`dataset.labels.parts`, residues and ids checked by :mod:`dataset.store.ingest`, values
made labels by :mod:`dataset.labels.values`. Left to others: names to numbers (:mod:`dataset.labels.label_space`),
splitting and keeping (:mod:`dataset.labels.store`).

Records of a table without an id column are called row1, row2 ..., on from file to file, so that ids stay unique.

Shape legend: N records, C label columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError, DataError
from common.progress import ConversionProgress, ProgressCallback
from common.text import counted
from dataset.fasta.counts import IngestCounts, SourceFile
from dataset.fasta.faults import Fault, Faults
from dataset.fasta.reader import find_files, is_fasta_name
from dataset.fasta.records import Lines
from dataset.labels.headers import compiled
from dataset.labels.parts import FastaParts, LabelledPart, TableParts, place_in_file, sample_parts
from dataset.labels.residues import ResidueLabels
from dataset.labels.table import UNREADABLE_SUFFIXES, is_table_name
from dataset.labels.values import Label, has_numbers, label_reader, part, weight
from dataset.store.conversion import SAMPLE, sample_source
from dataset.store.format import SampleSource
from dataset.store.ingest import CleanBlock, Ingest
from train_config.classifier_schema import LabelsSection, TokenizerSection
from train_config.schema import IngestSection, SampleSection

NO_FILE = -1


class LabelledCounts(IngestCounts):
    """Everything that reading, splitting and encoding changed or left out, and what remains.

    Attributes:
        labels_without_sequence: labels in a file of their own whose id no sequence has.
        label_values_missing: numbers that are missing in records which have others; no loss looks at these.
        records_unseen_label: held-out records that were left out, because no training record has their label.
        residues_unseen_label: held-out residues that no loss looks at, because no training record has their letter.
        held_out_also_in_training: held-out records whose sequence or text is in training too, which flatters metrics.
    """

    records_skipped_missing_label: int = 0
    labels_without_sequence: int = 0
    label_values_missing: int = 0
    records_unseen_label: int = 0
    residues_unseen_label: int = 0
    held_out_also_in_training: int = 0
    training: int = 0
    validation: int = 0
    test: int = 0


class Origins(NamedTuple):
    """Places where N records were read.

    Attributes:
        paths: the files.
        files: (N,) int32, index of each record's file, or :data:`NO_FILE`.
        numbers: (N,) int64, number of each in its file, from 1.
    """

    paths: list[Path]
    files: NDArray[np.int32]
    numbers: NDArray[np.int64]


@dataclass(frozen=True)
class LabelledRecords:
    """N records in the order of their files.

    Attributes:
        ids: unique.
        texts: sequences in the letters of the store's alphabet, or texts as they stand in the file.
        labels: names; lists of names; strings of letters, as long as their sequence; (N, C) float32 with NaN where a
            number is missing; or None.
        weights: (N,) float32 or None.
        parts: training, validation or test of each record, or None.
        counts: what was changed or left out.
        source: the files, or the embedded sample.
        held_out_source: the files whose records are validation for that.
        labels_source: the files that hold labels and masks alone.
        origins: where each record was read.
    """

    ids: list[str]
    texts: list[str]
    labels: list[str] | list[list[str]] | NDArray[np.float32] | None
    weights: NDArray[np.float32] | None
    parts: list[str] | None
    counts: LabelledCounts
    source: list[SourceFile] | SampleSource = field(default_factory=list)
    held_out_source: list[SourceFile] = field(default_factory=list)
    labels_source: list[SourceFile] = field(default_factory=list)
    origins: Origins | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def place(self, index: int) -> str:
        """Id, file and row (or line) of a record, for a message."""
        name = f"record {self.ids[index]!r}"
        if self.origins is None or self.origins.files[index] == NO_FILE:
            return name
        place = place_in_file(self.origins.paths[self.origins.files[index]], int(self.origins.numbers[index]))
        return f"{name} ({place})"


def read_labelled(
    sources: list[str],
    labels: LabelsSection,
    tokenizer: TokenizerSection,
    ingest: IngestSection,
    *,
    with_labels: bool = True,
    held_out_sources: Sequence[str] = (),
    sample: SampleSection | None = None,
    progress: ProgressCallback | None = None,
) -> LabelledRecords:
    """Read labelled files, or files to be labelled.

    Args:
        sources: files, folders and globs; tables by their suffix, anything else as FASTA. Or 'sample' for an embedded
            one, of proteins or texts as ``tokenizer.content`` says.
        labels: where labels stand, and what to do where they don't.
        tokenizer: what texts hold; residues are checked and mended.
        ingest: policies for residues and for ids that are there twice.
        with_labels: False reads ids and texts alone.
        held_out_sources: more files, whose records are validation while those of ``sources`` are training.
        sample: settings of the sample.
        progress: called after every few thousand records.

    Raises:
        DataError: a file or record is refused, or none is left.
        ConfigError: settings that do not fit together, or not with the files.
    """
    check_label_settings(labels, tokenizer)
    reader = _Reader(labels, tokenizer, ingest, with_labels, progress)
    source: list[SourceFile] | SampleSource
    with reader.faults.raised_at_end():
        if sources == [SAMPLE]:
            source = sample_source(sample or SampleSection())
            reader.read_sample(sample or SampleSection())
        else:
            source = reader.read(find_labelled_files(sources), "training")
        held_out = reader.read(find_labelled_files(list(held_out_sources)), "validation") if held_out_sources else []
    return reader.records(source, held_out)


def check_label_settings(labels: LabelsSection, tokenizer: TokenizerSection) -> None:
    """Refuse what can't be right whatever the files hold.

    Raises:
        ConfigError: which settings.
    """
    for column in labels.label_columns:
        if labels.label_columns.count(column) > 1:
            raise ConfigError(f"data.labels.label_columns: {column!r} stands there twice; leave one out")
    if labels.header_pattern is not None:
        compiled(labels.header_pattern)
    if labels.kind == "per_residue" and tokenizer.content != "protein":
        raise ConfigError(
            "data.labels.kind per_residue needs model.tokenizer.content protein: a text has no residues to label"
        )


def find_labelled_files(sources: list[str]) -> list[Path]:
    """The files that names of files, folders (FASTA and tables in them) and globs stand for, each once, in order.

    Raises:
        DataError: a name stands for nothing, or for a kind of file that can't be read.
    """
    names: list[str] = []
    for source in sources:
        folder = Path(source)
        inside = sorted(path for path in folder.rglob("*") if _is_wanted(path)) if folder.is_dir() else []
        names += [str(path) for path in inside] or [source]
    paths = find_files(names)
    for path in paths:
        if path.name.lower().endswith(UNREADABLE_SUFFIXES):
            raise DataError(f"{path}: this kind of file is not read; save it as CSV, TSV, Parquet or FASTA")
    return paths


def _is_wanted(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and (is_table_name(path) or is_fasta_name(path))


class _Met(NamedTuple):
    """Ids that were given to :class:`~dataset.store.ingest.Ingest`, and where they stand."""

    ids: Lines
    file: int
    numbers: Sequence[int]


class _Reader:
    """Gathers records from one file after the other."""

    def __init__(
        self,
        labels: LabelsSection,
        tokenizer: TokenizerSection,
        ingest: IngestSection,
        with_labels: bool,
        progress: ProgressCallback | None,
    ) -> None:
        self._settings = labels
        self._content = tokenizer.content
        self._with_labels = with_labels
        self._progress = progress
        self._ingest = Ingest(ingest, self._places_of_ids, content=tokenizer.content)
        self._label = label_reader(labels)
        self._residue_labels = ResidueLabels(labels) if with_labels and labels.labels_file is not None else None
        self._counts = LabelledCounts()
        self._paths: list[Path] = []
        self._rows_before = self._bytes_before = self._bytes_total = 0
        self._met: list[_Met] = []
        self._first_without_label: Callable[[], str] | None = None
        self._ids: list[str] = []
        self._texts: list[str] = []
        self._labels: list[Label] = []
        self._weights: list[float] = []
        self._parts: list[str] = []
        self._files: list[int] = []
        self._numbers: list[int] = []

    @property
    def faults(self) -> Faults:
        """The records that were refused."""
        return self._ingest.faults

    def read(self, paths: list[Path], part_of_files: str) -> list[SourceFile]:
        """Take the records of these files; the files as they were then."""
        self._bytes_total += sum(path.stat().st_size for path in paths)
        finished = []
        for path in paths:
            self._paths.append(path)
            if is_table_name(path):
                if self._residue_labels is not None:
                    raise ConfigError(
                        f"data.labels.labels_file is for FASTA, and {path} is read as a table: leave it out"
                    )
                table = TableParts(path, self._settings, self._content, self._with_labels, self._rows_before)
                finished.append(self._read_file(table, part_of_files))
                self._rows_before += table.num_rows
            else:
                fasta = FastaParts(path, self._settings, self._with_labels, self._residue_labels)
                finished.append(self._read_file(fasta, part_of_files))
        return finished

    def read_sample(self, sample: SampleSection) -> None:
        """Take the embedded sample's records."""
        for taken in sample_parts(sample, self._settings, self._content, self._with_labels):
            self._take(taken, NO_FILE, "training")

    def records(self, source: list[SourceFile] | SampleSource, held_out_source: list[SourceFile]) -> LabelledRecords:
        """All that was taken."""
        if not self._ids:
            first = "" if self._first_without_label is None else f": {self._first_without_label()}"
            raise DataError(f"no records are left after applying the policies of data.ingest and data.labels{first}")
        self._count_labels_without_sequence()
        settings, counts = self._settings, self._counts.model_copy()
        for name, value in self._ingest.counts:
            setattr(counts, name, getattr(counts, name) + value)
        labels: Any = self._labels if self._with_labels else None
        if self._with_labels and has_numbers(settings.kind, len(settings.label_columns)):
            labels = np.array(self._labels, dtype=np.float32)
        has_parts = self._with_labels and (bool(held_out_source) or settings.split_column is not None)
        return LabelledRecords(
            ids=self._ids,
            texts=self._texts,
            labels=labels,
            weights=np.array(self._weights, dtype=np.float32) if self._weights else None,
            parts=self._parts if has_parts else None,
            counts=counts,
            source=source,
            held_out_source=held_out_source,
            labels_source=self._residue_labels.files if self._residue_labels else [],
            origins=Origins(self._paths, np.array(self._files, np.int32), np.array(self._numbers, np.int64)),
        )

    def _read_file(self, parts: FastaParts | TableParts, part_of_files: str) -> SourceFile:
        for taken in parts:
            self._take(taken, len(self._paths) - 1, part_of_files)
            self._report(parts.bytes_read)
        self._bytes_before += parts.finished.bytes
        self._report(0)
        return parts.finished

    def _take(self, taken: LabelledPart, file: int, part_of_files: str) -> None:
        """Clean a part, and append what stays of it."""
        batch = taken.batch
        self._counts.records_read += taken.num_empty
        self._counts.records_skipped_empty += taken.num_empty
        self._met.append(_Met(batch.records.ids, file, taken.numbers))
        block = self._ingest.clean(batch) if len(batch) else None
        if block is None:
            return
        kept = range(len(batch)) if block.kept is None else block.kept.tolist()
        raw_lengths = batch.records.lengths
        for index, record_id, text in zip(kept, block.ids.split(), _pieces(block), strict=True):
            if taken.labels is not None:
                label = self._label_of(taken, index, len(text), int(raw_lengths[index]))
                if label is None:
                    continue
                self._labels.append(label)
                self._take_columns(taken, index, part_of_files)
            self._ids.append(record_id.decode("utf-8"))
            self._texts.append(text.decode("utf-8"))
            self._files.append(file)
            self._numbers.append(taken.numbers[index])

    def _take_columns(self, taken: LabelledPart, index: int, part_of_files: str) -> None:
        try:
            if taken.weights is not None:
                self._weights.append(weight(taken.weights[index]))
            self._parts.append(part_of_files if taken.splits is None else part(taken.splits[index]))
        except ValueError as error:
            self.faults.add("record{s} whose weight or split can't be read", Fault(taken.batch, index, str(error)))

    def _label_of(self, taken: LabelledPart, index: int, length: int, raw_length: int) -> Label | None:
        """The label of a record, as long as its sequence where each residue has one; None when it is left out."""
        assert taken.labels is not None
        try:
            label = self._label(taken.labels[index])
        except ValueError as error:
            self.faults.add("label{s} that can't be read", Fault(taken.batch, index, str(error)))
            return None
        if label is None:
            self._without_label(taken, index, taken.missing(index))
            return None
        if isinstance(label, tuple) and any(map(math.isnan, label)):
            lacking = [name for name, value in zip(self._settings.label_columns, label, strict=True) if value != value]
            if self._settings.missing_labels == "error":
                self._without_label(taken, index, f"no label in column {', '.join(map(repr, lacking))}")
            self._counts.label_values_missing += len(lacking)
        if self._settings.kind != "per_residue" or not length:
            return label
        assert isinstance(label, str)
        if len(label) == raw_length == length + 1:
            return label[:-1]  # that of the final '*', which was dropped and counted
        if len(label) != length:
            where = "" if self._settings.labels_file is None else f" in {self._settings.labels_file}"
            problem = (
                f"{counted(len(label), 'label{s}')}{where} for {counted(length, 'residue{s}')}; give each residue one "
                "letter ('.', '?' or '-' where it is not known, to be neither learnt nor scored)"
            )
            self.faults.add("record{s} with too few or too many labels", Fault(taken.batch, index, problem))
            return None
        return label

    def _without_label(self, taken: LabelledPart, index: int, problem: str) -> None:
        """Refuse or count a record without a label, or without one of several."""
        if self._settings.missing_labels == "error":
            remedy = "complete or remove the record, or give --data.labels.missing_labels skip"
            self.faults.add("record{s} without a label", Fault(taken.batch, index, f"{problem}; {remedy}"))
            return
        if self._first_without_label is None:
            # Finding the place reads the file again, which is worth it for a refusal alone.
            self._first_without_label = lambda: f"{taken.batch.place(index)}: {problem}"
        self._counts.records_skipped_missing_label += 1

    def _count_labels_without_sequence(self) -> None:
        """Refuse or count labels in a file of their own whose id no sequence has."""
        left = self._residue_labels.without_sequence() if self._residue_labels else []
        if self._residue_labels and left and self._settings.missing_labels == "error":
            more = f", nor have {len(left) - 1:,} more" if len(left) > 1 else ""
            raise DataError(
                f"{self._residue_labels.place(left[0])}: no sequence of data.source has this id{more}; add it, or give "
                "--data.labels.missing_labels skip"
            )
        self._counts.labels_without_sequence = len(left)

    def _places_of_ids(self, ids: set[str]) -> dict[str, str]:
        """Place of the first record with each of these ids."""
        wanted = {record_id.encode("utf-8"): record_id for record_id in ids}
        found: dict[str, str] = {}
        for met in self._met:
            if not any(encoded in met.ids.text for encoded in wanted):
                continue
            for encoded, number in zip(met.ids.split(), met.numbers, strict=True):
                if encoded in wanted and wanted[encoded] not in found:
                    place = "the sample" if met.file == NO_FILE else place_in_file(self._paths[met.file], number)
                    found[wanted[encoded]] = place
        return found

    def _report(self, bytes_of_file: int) -> None:
        if self._progress is not None:
            bytes_read = min(self._bytes_before + bytes_of_file, self._bytes_total)
            self._progress(ConversionProgress(bytes_read, self._bytes_total, self._ingest.counts.records_read))


def _pieces(block: CleanBlock) -> list[bytes]:
    ends = accumulate(block.lengths.tolist(), initial=0)
    return [block.residues[start:end] for start, end in pairwise(ends)]
