"""CSV, TSV or Parquet to columns of values, a few thousand rows at a time, with every refusal placed by row.

In: a path and the columns that are wanted. Out: :class:`TablePart`, values as they stand in the file: strings of CSV
and TSV, Python's own types of Parquet. What a value may be is left to :mod:`dataset.labels.labelled_file`.

Rows count from 1 and the header is none, nor is a blank line, which CSV has no other meaning for. CSV is read by
Python's csv module, strictly: a quote where none may be is an error, for otherwise it would swallow rows.
"""

from __future__ import annotations

import csv
import difflib
import io
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from xopen import xopen

from common.errors import DataError
from common.publishing import file_xxh128
from dataset.fasta.counts import SourceFile
from dataset.fasta.read_ahead import ReadAhead, TextStream
from dataset.fasta.reader import COMPRESSIONS

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_PARQUET = ".parquet"
SUFFIXES = (*(suffix + compression for suffix in _DELIMITERS for compression in COMPRESSIONS), _PARQUET)
UNREADABLE_SUFFIXES = (".json", ".jsonl", ".xlsx", ".xls", ".ods", ".feather", ".arrow", ".pkl", ".parquet.gz")

PART_ROWS = 4096
_LONGEST_FIELD = 1 << 30


@dataclass(frozen=True)
class TablePart:
    """Some rows of a table.

    Attributes:
        first_row: number of the first.
        lines: line of the file on which each starts; None where there are no lines.
        columns: a list of values for each column that was wanted; None is a missing one.
    """

    first_row: int
    lines: list[int] | None
    columns: dict[str, list[Any]]


def is_table_name(path: Path) -> bool:
    """Return whether the name ends like a table's."""
    return path.name.lower().endswith(SUFFIXES)


class Table:
    """One table, read once from first to last row.

    Attributes:
        finished: the file as it was read, once it was.
    """

    def __init__(self, path: Path, wanted: Mapping[str, str]) -> None:
        """Read nothing yet.

        Args:
            path: the file.
            wanted: for each column to read, the setting that names it, for messages.
        """
        self.finished: SourceFile | None = None
        self._path = path
        self._wanted = wanted
        self._opened: ReadAhead | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes of the file, as it lies on disk, that went into what was given out."""
        return self._opened.bytes_read if self._opened else 0

    def parts(self) -> Iterator[TablePart]:
        """The rows in order.

        Raises:
            DataError: the file can't be read, lacks a column or a row, is not UTF-8, or has rows of different lengths.
        """
        is_parquet = self._path.name.lower().endswith(_PARQUET)
        try:
            num_rows = 0
            for part in self._parquet_parts() if is_parquet else self._text_parts():
                num_rows = part.first_row
                yield part
        except OSError as error:
            raise DataError(f"{self._path}: can't be read: {error.strerror or error}") from error
        if not num_rows:
            raise DataError(f"{self._path}: holds no rows, only a header; give a table with records")

    def _text_parts(self) -> Iterator[TablePart]:
        with ReadAhead(self._path) as raw:
            self._opened = raw
            text = io.TextIOWrapper(io.BufferedReader(TextStream(raw)), encoding="utf-8-sig", newline="")
            try:
                yield from self._rows(text)
            except UnicodeDecodeError as error:
                raise DataError(f"{_place_of_bad_bytes(self._path)}: not UTF-8; save the table as UTF-8") from error
            self.finished = raw.source_file()

    def _rows(self, text: io.TextIOWrapper) -> Iterator[TablePart]:
        suffix = _suffix(self._path)
        csv.field_size_limit(_LONGEST_FIELD)  # of the process; 131,072 characters by default, and texts may be longer
        reader = csv.reader(text, delimiter=_DELIMITERS[suffix], strict=True)
        header: list[str] = []
        rows: list[list[str]] = []
        lines: list[int] = []
        first_row, line = 1, 1
        try:
            for row in reader:
                line, row_line = reader.line_num + 1, line
                if not row:
                    continue
                if not header:
                    header = row
                    at = self._positions(header)
                    continue
                if len(row) != len(header):
                    number = first_row + len(rows)
                    raise DataError(_ragged(self._path, number, row_line, len(row), header, _DELIMITERS[suffix]))
                rows.append(row)
                lines.append(row_line)
                if len(rows) == PART_ROWS:
                    yield TablePart(first_row, lines, {name: [row[place] for row in rows] for name, place in at})
                    first_row, rows, lines = first_row + len(rows), [], []
        except csv.Error as error:
            raise DataError(
                f"{self._path}, line {line}: not {suffix[1:].upper()}: {error}; a text that holds quotes stands in "
                "quotes, and each quote in it is written twice"
            ) from error
        if not header:
            raise DataError(f"{self._path}: holds nothing, not even a header; give a table with a header and records")
        if rows:
            yield TablePart(first_row, lines, {name: [row[place] for row in rows] for name, place in at})

    def _parquet_parts(self) -> Iterator[TablePart]:
        try:
            status = self._path.stat()
            with pq.ParquetFile(self._path) as file:
                self._positions(file.schema_arrow.names)
                first_row = 1
                for batch in file.iter_batches(PART_ROWS, columns=list(self._wanted), use_threads=False):
                    if batch.num_rows:
                        columns = {name: batch.column(name).to_pylist() for name in self._wanted}
                        yield TablePart(first_row, None, columns)
                        first_row += batch.num_rows
        except (pa.ArrowException, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{self._path}: not Parquet, or damaged ({reason}); make it or copy it again") from error
        self.finished = SourceFile(
            path=str(self._path.resolve()),
            bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            xxh128=file_xxh128(self._path),
        )

    def _positions(self, header: list[str]) -> list[tuple[str, int]]:
        """Name and place of each column that is wanted."""
        for name, setting in self._wanted.items():
            if header.count(name) == 1:
                continue
            if name in header:
                raise DataError(
                    f"{self._path}: {header.count(name)} columns are called {name!r} ({setting}); rename them"
                )
            free = [column for column in header if column not in self._wanted] or header
            near = (difflib.get_close_matches(name, free, n=1) or free)[0]
            answer = f"set {setting}, as --{setting} {shlex.quote(near)}"
            if len(header) == 1:
                answer = f"is it separated by something else than its suffix says? Otherwise {answer}"
            raise DataError(f"{self._path}: no column {name!r}; it has {', '.join(map(repr, header))}: {answer}")
        return [(name, header.index(name)) for name in self._wanted]


def _suffix(path: Path) -> str:
    """The suffix without that of a compression."""
    whole = Path(path.name.lower())
    return Path(whole.stem).suffix if whole.suffix in COMPRESSIONS else whole.suffix


def _ragged(path: Path, row: int, line: int, num_fields: int, header: list[str], delimiter: str) -> str:
    name = "tab" if delimiter == "\t" else "comma"
    return (
        f"{path}, row {row}, line {line}: {num_fields} fields where the header has {len(header)}; "
        f"complete the row, or put a text that holds a {name} in quotes"
    )


def _place_of_bad_bytes(path: Path) -> str:
    """File and line of the first bytes that are not UTF-8."""
    with xopen(path, "rb", threads=0) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"{path}, line {number}, byte {error.start + 1}"
    return str(path)  # replaced in between
