"""Labelled files to parts: ids and texts as a batch, and beside each record what stands for its label.

In: FASTA files and tables, and the settings that say where labels stand. Out: :class:`LabelledPart`, values as they
stand in the file. What they mean is left to :mod:`dataset.labels.labelled_file`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from common.errors import ConfigError, DataError
from dataset.fasta.counts import SourceFile
from dataset.fasta.locate import place_of_record
from dataset.fasta.reader import FastaSource, RecordBatch
from dataset.fasta.records import Lines, Records, hashes_of, lengths_of
from dataset.labels.residues import ResidueLabels
from dataset.labels.samples import located_records, message_records
from dataset.labels.values import text_of
from dataset.store.conversion import sample_batches
from dataset.store.ingest import CleanBlock
from dataset.table import Table, TablePart, is_table_name
from train_config.classifier_schema import LabelsSection
from train_config.schema import SampleSection

Content = Literal["protein", "text"]

_SAMPLE_PATTERN = r"^(?P<label>\w+)_\d+$"
"""The label in an id of the embedded labelled samples, where settings name no other."""


class LabelledPart(NamedTuple):
    """Some records of a file.

    Attributes:
        batch: ids and texts.
        numbers: number of each record in its file, from 1.
        labels: values of the label columns of each record; None where labels are not read.
        weights, splits: value of each record; None where there is no such column.
        missing: the message for the record at an index when it has no label.
        num_empty: rows that were left out, because they have no text.
    """

    batch: RecordBatch
    numbers: Sequence[int]
    labels: Sequence[Sequence[Any]] | None = None
    weights: list[Any] | None = None
    splits: list[Any] | None = None
    missing: Callable[[int], str] = str
    num_empty: int = 0


def place_in_file(path: Path, number: int) -> str:
    """File and row, or file, line and record, of the record with this number, for a message."""
    return f"{path}, row {number}" if is_table_name(path) else place_of_record(path, number)


def texts_of(block: CleanBlock) -> list[str]:
    """The texts of a block one by one."""
    ends = accumulate(block.lengths.tolist(), initial=0)
    return [block.residues[start:end].decode("utf-8") for start, end in pairwise(ends)]


def sample_parts(
    sample: SampleSection, settings: LabelsSection, content: Content, with_labels: bool
) -> Iterator[LabelledPart]:
    """The embedded labelled sample, of proteins or of texts."""
    number = 1
    if content == "text":
        records = message_records(sample.records, sample.seed)
    else:
        records = located_records(sample.records, sample.families, sample.seed)
    for batch in sample_batches(records):
        yield _headers_read(batch, number, settings, with_labels, _SAMPLE_PATTERN)
        number += len(batch)


def parts_of_files(
    paths: list[Path],
    settings: LabelsSection,
    content: Content,
    with_labels: bool,
    residue_labels: ResidueLabels | None = None,
) -> Iterator[tuple[Path, FastaParts | TableParts]]:
    """Each file with its parts, to be read before the next; rows without an id are numbered on from file to file.

    Raises ConfigError where settings are for another kind of file.
    """
    rows_before = 0
    for path in paths:
        if not is_table_name(path):
            yield path, FastaParts(path, settings, with_labels, residue_labels)
            continue
        if residue_labels is not None:
            raise ConfigError(f"data.labels.labels_file is for FASTA, and {path} is read as a table: leave it out")
        table = TableParts(path, settings, content, with_labels, rows_before)
        yield path, table
        rows_before += table.num_rows


def first_places(ids: set[str], files: Iterable[tuple[Path | None, Iterable[LabelledPart]]]) -> dict[str, str]:
    """Place of the first record with each of these ids; a path of None stands for the sample."""
    found: dict[str, str] = {}
    for path, parts in files:
        for part in parts:
            for encoded, number in zip(part.batch.records.ids.split(), part.numbers, strict=True):
                record_id = encoded.decode("utf-8")
                if record_id in ids and record_id not in found:
                    found[record_id] = place_in_file(path, number) if path else "the sample"
            if len(found) == len(ids):
                return found
    return found


class FastaParts:
    """A FASTA file, its labels in its headers, or those of ``residue_labels``.

    Raises ConfigError where settings are for tables alone.
    """

    def __init__(
        self, path: Path, settings: LabelsSection, with_labels: bool, residue_labels: ResidueLabels | None = None
    ) -> None:
        self._source = FastaSource([str(path)])
        self._settings = settings
        self._with_labels = with_labels
        self._residue_labels = residue_labels
        if with_labels:
            self._refuse_columns(path)

    @property
    def bytes_read(self) -> int:
        """Bytes of the file on disk that were read so far."""
        return self._source.bytes_read

    @property
    def finished(self) -> SourceFile:
        """The file as it was read, once it was."""
        return self._source.finished[0]

    def __iter__(self) -> Iterator[LabelledPart]:
        """Yield the records in order.

        Raises DataError where the file is not FASTA, ConfigError where settings do not say where labels stand.
        """
        number = 1
        for batch in self._source.batches():
            if self._residue_labels is None:
                yield _headers_read(batch, number, self._settings, self._with_labels)
            else:
                yield _with_residue_labels(batch, number, self._residue_labels, self._settings)
            number += len(batch)

    def _refuse_columns(self, path: Path) -> None:
        settings = self._settings
        for name, is_set in (
            ("weight_column", settings.weight_column is not None),
            ("split_column", settings.split_column is not None and not self._residue_labels),
            ("label_columns", len(settings.label_columns) > 1),
        ):
            if is_set:
                raise ConfigError(f"data.labels.{name} is for tables, and {path} is read as FASTA: leave it out")


class TableParts:
    """A table, its labels in columns.

    Args:
        path: the file.
        settings: the columns.
        content: how texts are encoded.
        with_labels: False reads ids and texts alone.
        rows_before: added to the number of a row without an id, to name it.

    Attributes:
        num_rows: given out so far.
    """

    def __init__(
        self, path: Path, settings: LabelsSection, content: Content, with_labels: bool, rows_before: int
    ) -> None:
        self.num_rows = 0
        self._path = path
        self._settings = settings
        self._content = content
        self._with_labels = with_labels
        self._rows_before = rows_before
        self._table = Table(path, self._wanted_columns())

    @property
    def bytes_read(self) -> int:
        """Bytes of the file on disk that were read so far."""
        return self._table.bytes_read

    @property
    def finished(self) -> SourceFile:
        """The file as it was read, once it was."""
        assert self._table.finished is not None
        return self._table.finished

    def __iter__(self) -> Iterator[LabelledPart]:
        """Yield the records in order; raises DataError where the file can't be read, or a row has no text or no id."""
        for rows in self._table.parts():
            self.num_rows += len(rows.columns[self._settings.text_column])
            yield self._part(rows)

    def _wanted_columns(self) -> dict[str, str]:
        settings = self._settings
        columns = [("text_column", settings.text_column), ("id_column", settings.id_column)]
        if self._with_labels:
            columns += [("label_columns", column) for column in settings.label_columns]
            columns += [("weight_column", settings.weight_column), ("split_column", settings.split_column)]
        wanted: dict[str, str] = {}
        for setting, column in columns:
            if column is not None:
                wanted.setdefault(column, f"data.labels.{setting}")
        return wanted

    def _part(self, rows: TablePart) -> LabelledPart:
        settings, columns = self._settings, rows.columns
        kept, texts = self._texts(rows)

        def column(name: str | None) -> list[Any] | None:
            return None if name is None or not self._with_labels else [columns[name][index] for index in kept]

        ids = [self._id(rows, index) for index in kept]
        lines = Lines.of(ids)  # whole headers, which may hold blanks
        records = Records(lines, lines, b"".join(texts), lengths_of(texts), hashes_of(ids), hashes_of(texts))
        numbers = [rows.first_row + index for index in kept]
        labels = list(zip(*(column(name) or [] for name in settings.label_columns), strict=True))
        return LabelledPart(
            batch=_Rows(records, path=self._path, numbers=numbers, has_ids=settings.id_column is not None),
            numbers=numbers,
            labels=labels if self._with_labels else None,
            weights=column(settings.weight_column),
            splits=column(settings.split_column),
            missing=lambda _: f"no label in column {', '.join(map(repr, settings.label_columns))}",
            num_empty=len(columns[settings.text_column]) - len(kept),
        )

    def _texts(self, rows: TablePart) -> tuple[list[int], list[bytes]]:
        """Indices and texts of the rows that have one."""
        kept: list[int] = []
        texts: list[bytes] = []
        for index, value in enumerate(rows.columns[self._settings.text_column]):
            text = self._text(rows, index, value)
            if text.strip():
                kept.append(index)
                texts.append(self._encoded(text))
            elif self._settings.empty_texts == "error":
                raise DataError(
                    f"{self._path}, row {rows.first_row + index}: column {self._settings.text_column!r} is empty; "
                    "complete or remove the row, or give --data.labels.empty_texts skip"
                )
        return kept, texts

    def _encoded(self, text: str) -> bytes:
        if self._content == "text":
            return text.encode("utf-8")
        # One byte for each character, so that places hold; what is no letter at all is refused like any other.
        return text.strip().encode("latin-1", errors="replace")

    def _id(self, rows: TablePart, index: int) -> bytes:
        column = self._settings.id_column
        if column is None:
            return b"row%d" % (self._rows_before + rows.first_row + index)
        found = self._text(rows, index, rows.columns[column][index]).strip()
        if not found or "\n" in found or "\r" in found:
            raise DataError(
                f"{self._path}, row {rows.first_row + index}: the id in column {column!r} is empty or holds a line "
                "break; give each row an id of one line, or leave data.labels.id_column out"
            )
        return found.encode("utf-8")

    def _text(self, rows: TablePart, index: int, value: Any) -> str:
        try:
            return text_of(value)
        except ValueError as error:
            raise DataError(f"{self._path}, row {rows.first_row + index}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _Rows(RecordBatch):
    """Records of a table."""

    path: Path
    numbers: list[int]
    has_ids: bool

    def place(self, index: int, residue: int | None = None) -> str:
        character = "" if residue is None else f", character {residue + 1}"
        name = f", record {self.records.ids.split()[index].decode('utf-8')!r}" if self.has_ids else ""
        return f"{self.path}, row {self.numbers[index]}{character}{name}"


def header_pattern(settings: LabelsSection, default: str | None = None) -> re.Pattern[str]:
    """Pattern whose group 'label', or else first group, is the label in a FASTA header.

    Raises ConfigError where no place is named, or the pattern is no regular expression with a group.
    """
    if settings.header_field is not None:
        return re.compile(rf"^\s*(?:\S+\s+){{{settings.header_field}}}(\S+)")
    pattern = settings.header_pattern or default
    if pattern is None:
        raise ConfigError(
            "labels of FASTA stand in its headers: set data.labels.header_field or data.labels.header_pattern"
        )
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"data.labels.header_pattern {pattern!r} is no regular expression: {error}") from error
    if not found.groups:
        raise ConfigError(f"data.labels.header_pattern {pattern!r} has no group: put (?P<label>...) around the label")
    return found


def _headers_read(
    batch: RecordBatch, number: int, settings: LabelsSection, with_labels: bool, default_pattern: str | None = None
) -> LabelledPart:
    numbers = range(number, number + len(batch))
    if not with_labels:
        return LabelledPart(batch, numbers)
    pattern = header_pattern(settings, default_pattern)
    group = "label" if "label" in pattern.groupindex else 1
    headers = [header.decode("ascii") for header in batch.headers]
    labels = [(match[group] if (match := pattern.search(header)) else None,) for header in headers]
    place = f"pattern {pattern.pattern!r}" if settings.header_field is None else f"field {settings.header_field}"
    return LabelledPart(
        batch,
        numbers,
        labels,
        missing=lambda index: f"data.labels.header_{place} finds no label in the header {headers[index]!r}",
    )


def _with_residue_labels(
    batch: RecordBatch, number: int, residue_labels: ResidueLabels, settings: LabelsSection
) -> LabelledPart:
    ids = [record_id.decode("ascii") for record_id in batch.records.ids.split()]
    return LabelledPart(
        batch,
        range(number, number + len(batch)),
        labels=[(residue_labels.letters(record_id),) for record_id in ids],
        splits=None if settings.split_column is None else [residue_labels.part(record_id) for record_id in ids],
        missing=lambda _: f"no labels of this id in {settings.labels_file}",
    )
