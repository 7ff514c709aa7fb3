"""One labelled file to parts: ids and texts as a batch, and beside each record what stands for its label.

In: a FASTA file or a table, and the settings that say where labels stand. Out: :class:`LabelledPart`, values as they
stand in the file. What they mean is left to :mod:`dataset.labels.labelled_file`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from common.errors import ConfigError, DataError
from dataset.fasta.counts import SourceFile
from dataset.fasta.locate import place_of_record
from dataset.fasta.reader import FastaSource, RecordBatch
from dataset.fasta.records import Lines, Records, hashes_of, lengths_of
from dataset.labels.headers import SAMPLE_PATTERN, HeaderLabels
from dataset.labels.residues import ResidueLabels
from dataset.labels.sample_locations import located_records
from dataset.labels.sample_messages import message_records
from dataset.labels.table import Table, TablePart, is_table_name
from dataset.labels.values import text_of
from dataset.store.conversion import sample_batches
from train_config.classifier_schema import LabelsSection
from train_config.schema import SampleSection

Content = Literal["protein", "text"]


class LabelledPart(NamedTuple):
    """Some records of a file.

    Attributes:
        batch: ids and texts.
        numbers: number of each record in its file, from 1.
        labels: values of the label columns of each record; None where labels are not read.
        weights, splits: value of each record; None where there is no such column.
        missing: what to say of the record at an index when it has no label.
        num_empty: rows that were left out, because they have no text.
    """

    batch: RecordBatch
    numbers: Sequence[int]
    labels: list[Sequence[Any]] | None
    weights: list[Any] | None
    splits: list[Any] | None
    missing: Callable[[int], str]
    num_empty: int = 0


def place_in_file(path: Path, number: int) -> str:
    """File and row, or file, line and record, of the record with this number, for a message."""
    return f"{path}, row {number}" if is_table_name(path) else place_of_record(path, number)


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
        yield _headers_read(batch, number, settings, with_labels, SAMPLE_PATTERN)
        number += len(batch)


class FastaParts:
    """A FASTA file, its labels in its headers or in a file of their own."""

    def __init__(
        self, path: Path, settings: LabelsSection, with_labels: bool, residue_labels: ResidueLabels | None = None
    ) -> None:
        """Read nothing yet.

        Args:
            path: the file.
            settings: where in headers labels stand.
            with_labels: False reads ids and sequences alone.
            residue_labels: in place of what headers say.

        Raises:
            ConfigError: settings that only tables can fulfil.
        """
        self._source = FastaSource([str(path)])
        self._settings = settings
        self._with_labels = with_labels
        self._residue_labels = residue_labels
        if with_labels:
            self._refuse_columns(path)

    @property
    def bytes_read(self) -> int:
        """Bytes of the file on disk that went into what was given out."""
        return self._source.bytes_read

    @property
    def finished(self) -> SourceFile:
        """The file as it was read, once it was."""
        return self._source.finished[0]

    def __iter__(self) -> Iterator[LabelledPart]:
        """The records in order.

        Raises:
            DataError: the file can't be read or is not FASTA.
            ConfigError: the settings do not say where labels stand.
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
        for name, value in (("weight_column", settings.weight_column), ("split_column", settings.split_column)):
            if value is not None and not (name == "split_column" and self._residue_labels):
                raise ConfigError(f"data.labels.{name} is for tables, and {path} is read as FASTA: leave it out")
        if len(settings.label_columns) > 1:
            raise ConfigError(
                f"data.labels.label_columns: several are for tables, and {path} is read as FASTA, with one label in a "
                "header: name one"
            )


class TableParts:
    """A table, its labels in columns.

    Attributes:
        num_rows: given out so far.
    """

    def __init__(
        self, path: Path, settings: LabelsSection, content: Content, with_labels: bool, rows_before: int
    ) -> None:
        """Read nothing yet.

        Args:
            path: the file.
            settings: the columns.
            content: how texts are encoded.
            with_labels: False reads ids and texts alone.
            rows_before: what is added to the number of a row without an id to call it by.
        """
        self.num_rows = 0
        self._path = path
        self._settings = settings
        self._content = content
        self._with_labels = with_labels
        self._rows_before = rows_before
        self._table = Table(path, self._wanted_columns())

    @property
    def bytes_read(self) -> int:
        """Bytes of the file on disk that went into what was given out."""
        return self._table.bytes_read

    @property
    def finished(self) -> SourceFile:
        """The file as it was read, once it was."""
        assert self._table.finished is not None
        return self._table.finished

    def __iter__(self) -> Iterator[LabelledPart]:
        """The rows in order.

        Raises:
            DataError: the file can't be read, or a row has no text or no id.
        """
        for rows in self._table.parts():
            self.num_rows += len(rows.columns[self._settings.text_column])
            yield self._part(rows)

    def _wanted_columns(self) -> dict[str, str]:
        settings = self._settings
        wanted = {settings.text_column: "data.labels.text_column"}
        if settings.id_column is not None:
            wanted.setdefault(settings.id_column, "data.labels.id_column")
        if self._with_labels:
            for column in settings.label_columns:
                wanted.setdefault(column, "data.labels.label_columns")
            if settings.weight_column is not None:
                wanted.setdefault(settings.weight_column, "data.labels.weight_column")
            if settings.split_column is not None:
                wanted.setdefault(settings.split_column, "data.labels.split_column")
        return wanted

    def _part(self, rows: TablePart) -> LabelledPart:
        settings, columns = self._settings, rows.columns
        kept, texts = self._texts(rows)

        def column(name: str | None) -> list[Any] | None:
            return None if name is None or not self._with_labels else [columns[name][index] for index in kept]

        numbers = [rows.first_row + index for index in kept]
        labels = [columns[name] for name in settings.label_columns] if self._with_labels else []
        return LabelledPart(
            batch=_Rows(
                _as_records([self._id(rows, index) for index in kept], texts),
                path=self._path,
                numbers=numbers,
                lines=[rows.lines[index] for index in kept] if rows.lines else None,
                has_ids=settings.id_column is not None,
            ),
            numbers=numbers,
            labels=[[values[index] for values in labels] for index in kept] if self._with_labels else None,
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
            text = self._encoded(self._text(rows, index, value))
            if text:
                kept.append(index)
                texts.append(text)
            elif self._settings.empty_texts == "error":
                raise DataError(
                    f"{_row_place(self._path, rows, index)}: column {self._settings.text_column!r} is empty; complete "
                    "or remove the row, or give --data.labels.empty_texts skip"
                )
        return kept, texts

    def _encoded(self, text: str) -> bytes:
        if self._content == "text":
            return text.encode("utf-8") if text.strip() else b""
        # One byte for each character, so that places hold; what is no letter at all is refused like any other.
        return text.strip().encode("latin-1", errors="replace")

    def _id(self, rows: TablePart, index: int) -> bytes:
        column = self._settings.id_column
        if column is None:
            return b"row%d" % (self._rows_before + rows.first_row + index)
        found = self._text(rows, index, rows.columns[column][index]).strip()
        if not found or "\n" in found or "\r" in found:
            problem = "holds a line break" if found else "is empty"
            raise DataError(
                f"{_row_place(self._path, rows, index)}: the id in column {column!r} {problem}; give each row an id of "
                "one line, or leave data.labels.id_column out"
            )
        return found.encode("utf-8")

    def _text(self, rows: TablePart, index: int, value: Any) -> str:
        try:
            return text_of(value)
        except ValueError as error:
            raise DataError(f"{_row_place(self._path, rows, index)}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _Rows(RecordBatch):
    """Records of a table."""

    path: Path
    numbers: list[int]
    lines: list[int] | None
    has_ids: bool

    def place(self, index: int, residue: int | None = None) -> str:
        line = f", line {self.lines[index]}" if self.lines else ""
        character = "" if residue is None else f", character {residue + 1}"
        name = f", record {self.records.ids.split()[index].decode('utf-8')!r}" if self.has_ids else ""
        return f"{self.path}, row {self.numbers[index]}{line}{character}{name}"


def _row_place(path: Path, rows: TablePart, index: int) -> str:
    line = f", line {rows.lines[index]}" if rows.lines else ""
    return f"{path}, row {rows.first_row + index}{line}"


def _headers_read(
    batch: RecordBatch, number: int, settings: LabelsSection, with_labels: bool, default_pattern: str | None = None
) -> LabelledPart:
    numbers = range(number, number + len(batch))
    if not with_labels:
        return LabelledPart(batch, numbers, None, None, None, str)
    finder = HeaderLabels(settings, default_pattern)
    headers = [header.decode("ascii") for header in batch.headers]
    labels: list[Sequence[Any]] = [(finder.find(header),) for header in headers]
    return LabelledPart(batch, numbers, labels, None, None, lambda index: finder.missing(headers[index]))


def _with_residue_labels(
    batch: RecordBatch, number: int, residue_labels: ResidueLabels, settings: LabelsSection
) -> LabelledPart:
    ids = [record_id.decode("ascii") for record_id in batch.records.ids.split()]
    return LabelledPart(
        batch,
        range(number, number + len(batch)),
        labels=[(residue_labels.letters(record_id),) for record_id in ids],
        weights=None,
        splits=None if settings.split_column is None else [residue_labels.part(record_id) for record_id in ids],
        missing=lambda _: f"no labels of this id in {settings.labels_file}",
    )


def _as_records(ids: list[bytes], texts: list[bytes]) -> Records:
    """Records whose whole header is their id, which may hold blanks."""
    lines = Lines.of(ids)
    return Records(lines, lines, b"".join(texts), lengths_of(texts), hashes_of(ids), hashes_of(texts))
