"""CSV, TSV or Parquet to columns of values, a few thousand rows at a time.

In: a path and the wanted columns. Out: :class:`TablePart`, values as they stand in the file: strings of CSV and TSV,
Python's own types of Parquet. Rows count from 1, without the header and blank lines. CSV is read strictly: a quote
where none may be is an error, for otherwise it would swallow rows.
"""

from __future__ import annotations

import csv
import difflib
import io
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from common.errors import DataError
from common.publishing import file_xxh128
from dataset.fasta.counts import SourceFile
from dataset.fasta.read_ahead import ReadAhead, TextStream
from dataset.fasta.reader import COMPRESSIONS

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_PARQUET = ".parquet"
_SUFFIXES = (*(suffix + compression for suffix in _DELIMITERS for compression in COMPRESSIONS), _PARQUET)

PART_ROWS = 4096
_LONGEST_FIELD = 1 << 30

Columns = dict[str, Sequence[Any]]
"""The values of some rows by column; None is a missing one."""


class TablePart(NamedTuple):
    """Some rows of a table, with the number of the first."""

    first_row: int
    columns: Columns


def is_table_name(path: Path) -> bool:
    """Return whether the name ends like a table's."""
    return path.name.lower().endswith(_SUFFIXES)


class Table:
    """One table, read once from first to last row.

    Args:
        path: the file.
        wanted: for each column to read, the setting that names it, for messages.

    Attributes:
        finished: the file as it was read, once it was.
    """

    def __init__(self, path: Path, wanted: Mapping[str, str]) -> None:
        self.finished: SourceFile | None = None
        self._path = path
        self._wanted = wanted
        self._opened: ReadAhead | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes of the file on disk that were read so far."""
        return self._opened.bytes_read if self._opened else 0

    def parts(self) -> Iterator[TablePart]:
        """Yield the rows in order.

        Raises DataError where the file can't be read, lacks a column, has no rows or rows of different lengths.
        """
        is_parquet = self._path.name.lower().endswith(_PARQUET)
        num_rows = 0
        try:
            for columns in self._parquet() if is_parquet else self._text():
                yield TablePart(num_rows + 1, columns)
                num_rows += len(next(iter(columns.values())))
        except OSError as error:
            raise DataError(f"{self._path}: can't be read: {error.strerror or error}") from error
        if not num_rows:
            raise DataError(f"{self._path}: holds no rows; give a table with a header and records")

    def _text(self) -> Iterator[Columns]:
        csv.field_size_limit(_LONGEST_FIELD)  # of the process; 131,072 characters by default, and texts may be longer
        name = self._path.name.lower()
        delimiter = next(
            found
            for suffix, found in _DELIMITERS.items()
            if name.endswith(tuple(suffix + compression for compression in COMPRESSIONS))
        )
        with ReadAhead(self._path) as raw:
            self._opened = raw
            text = io.TextIOWrapper(io.BufferedReader(TextStream(raw)), encoding="utf-8-sig", newline="")
            reader = csv.reader(text, delimiter=delimiter, strict=True)
            try:
                yield from self._rows(row for row in reader if row)
            except csv.Error as error:
                raise DataError(
                    f"{self._path}, line {reader.line_num}: not CSV: {error}; a text that holds quotes stands in "
                    "quotes, and each quote in it is written twice"
                ) from error
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{self._path}, after line {reader.line_num}: byte 0x{error.object[error.start]:02x} is not UTF-8; "
                    "save the table as UTF-8"
                ) from error
            self.finished = raw.source_file()

    def _rows(self, rows: Iterator[list[str]]) -> Iterator[Columns]:
        header = next(rows, [])
        if header:
            self._check_columns(header)
        num_rows = 0
        while some := list(islice(rows, PART_ROWS)):
            for number, row in enumerate(some, start=num_rows + 1):
                if len(row) != len(header):
                    raise DataError(
                        f"{self._path}, row {number}: {len(row)} fields where the header has {len(header)}; complete "
                        "the row, or put a text that holds the separator in quotes"
                    )
            columns = dict(zip(header, zip(*some, strict=True), strict=True))
            yield {name: columns[name] for name in self._wanted}
            num_rows += len(some)

    def _parquet(self) -> Iterator[Columns]:
        try:
            status = self._path.stat()
            with pq.ParquetFile(self._path) as file:
                self._check_columns(file.schema_arrow.names)
                for batch in file.iter_batches(PART_ROWS, columns=list(self._wanted), use_threads=False):
                    if batch.num_rows:
                        yield batch.to_pydict()
        except (pa.ArrowException, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{self._path}: not Parquet, or damaged ({reason}); make it or copy it again") from error
        self.finished = SourceFile(
            path=str(self._path.resolve()),
            bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            xxh128=file_xxh128(self._path),
        )

    def _check_columns(self, header: list[str]) -> None:
        for name, setting in self._wanted.items():
            if header.count(name) > 1:
                raise DataError(
                    f"{self._path}: {header.count(name)} columns are called {name!r} ({setting}); rename them"
                )
            if name not in header:
                free = [column for column in header if column not in self._wanted] or header
                near = (difflib.get_close_matches(name, free, n=1) or free)[0]
                raise DataError(
                    f"{self._path}: no column {name!r}; it has {', '.join(map(repr, header))}: "
                    f"set {setting}, as --{setting} {shlex.quote(near)}"
                )
