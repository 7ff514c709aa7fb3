"""Read tables: CSV and TSV, plain or compressed, and Parquet, a few thousand rows at a time.

Values are strings for CSV and TSV, and Python types for Parquet. None is a missing value (:data:`MISSING`).

The separator is taken from Excel's first line ``sep=;``. Otherwise it is comma, semicolon or tab, whichever matches the
header, because spreadsheets write all of them into files called CSV. Rows count from 1, without the header and blank
lines. A stray quote that would swallow rows is an error. :func:`numbered_lines` reads line-based files without header
or quotes.

For 116 MB of proteins, Python's csv takes 1.0 s of CPU. pyarrow's reader (26.0) with conversion to Python values takes
0.9 s.
"""

import csv
import difflib
import io
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from esmeray.common.errors import DataError, did_you_mean, first_line, reading
from esmeray.dataset.fasta.counts import SourceFile
from esmeray.dataset.fasta.locate import kind_of
from esmeray.dataset.fasta.reader import COMPRESSIONS, ReadAhead, TextStream, read_ahead

_PARQUET = ".parquet"
_SUFFIXES = (*(suffix + compression for suffix in (".csv", ".tsv") for compression in COMPRESSIONS), _PARQUET)

PART_ROWS = 4096
_LONGEST_TEXT = 1 << 25
_SEPARATORS = (",", ";", "\t")
_HEADER_BYTES = 1 << 16
_SEPARATOR_LINE = re.compile(rb'(?:\xef\xbb\xbf)?"?sep=(.)"?\r?\n', re.IGNORECASE)
_SHOWN = 20
_SHOWN_LETTERS = 60
_DATA = re.compile(r"[A-Z*-]{20,}|[-+]?\d*[.,]?\d+")
"""A sequence or a number, which is not a column name."""
_ID_NAME = re.compile(
    r"(?i:|unnamed: \d+|(?:.*[\W_])?(?:ids?|names?|acc?|accessions?|entry|identifiers?|index|uniprot(?:kb)?|pdb)"
    r"(?:[\W_].*)?)|.*[a-z]I[Dd]s?"
)
"""Column names that suggest ids. They are only suggested for id settings."""
_SURROGATE = re.compile("[\udc80-\udcff]")

MISSING = frozenset(
    (
        *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A"),
        *("NA", "NULL", "NaN", "None", "n/a", "nan", "null", "-"),
    )
)
"""Texts that mean a missing value in any column of any table, with or without blanks around them: pandas' default list,
and the dash of tables made by hand."""

Columns = dict[str, Sequence[Any]]
"""Values of some rows by column; None is a missing value."""


def is_missing(text: str, keep: Collection[str] = ()) -> bool:
    """Return whether a text means a missing value; ``keep`` has texts that are values nevertheless, e.g. NA."""
    stripped = text.strip()
    return not stripped or (stripped in MISSING and stripped not in keep)


def missing_note(value: Any, setting: str = "") -> str:
    """Return a note for messages, in brackets: why a value counts as missing, and the setting that keeps it.

    The note is empty if the value is blank.
    """
    text = "" if value is None or value != value else str(value).strip()  # NaN is not a text that could be kept
    keeps = f"; if it is a real value, give --{setting} {shlex.quote(text)}" if setting and is_missing(text) else ""
    verb = "means" if is_missing(text) else "has"
    return f" ({text!r:.60} {verb} a missing value{keeps})" if text else ""


def is_table_name(path: Path) -> bool:
    return path.name.lower().endswith(_SUFFIXES)


class Table:
    """A table that is read once from the first to the last row.

    ``wanted`` has, for each column to read, the setting that names it, for messages. It is empty if there is none, and
    None for an optional column. ``keep`` has texts of :data:`MISSING` that are values here. After reading, ``finished``
    holds the file's description. ``header`` holds the names of all columns once the first rows were read.
    """

    def __init__(self, path: Path, wanted: Mapping[str, str | None], keep: Collection[str] = ()) -> None:
        self.finished: list[SourceFile] = []
        self.header: list[str] = []
        self.wanted = wanted
        self._path = path
        self._keep = keep
        self._part: Columns = {}  # raw values, as in the file
        self._opened: ReadAhead | None = None

    @property
    def bytes_read(self) -> int:
        return self._opened.bytes_read if self._opened else 0

    def parts(self) -> Iterator[tuple[int, Columns]]:
        """Yield the rows in order, in parts, with the number of the first row.

        Raises DataError if the file can't be read, lacks a column, or has no rows or rows of different lengths.
        """
        is_parquet = self._path.name.lower().endswith(_PARQUET)
        first_row = 1
        with reading(self._path):
            for num_rows, part in self._parquet() if is_parquet else self._text():
                self._part = part
                yield first_row, {name: list(map(self._value, values)) for name, values in part.items()}
                first_row += num_rows
        if first_row == 1:
            raise DataError(f"{self._path}: the table has no rows; give a header and at least one record")

    def columns(self) -> Columns:
        """Return all rows of a small table at once; raises as :meth:`parts`."""
        columns: dict[str, list[Any]] = {name: [] for name in self.wanted}
        for _, part in self.parts():
            for name, values in part.items():
                columns[name] += values
        return dict(columns)

    def note(self, column: str, index: int, setting: str = "") -> str:
        """Return :func:`missing_note` for a cell of the part that was yielded last."""
        return missing_note(self._part[column][index], setting)

    def _value(self, value: Any) -> Any:
        return None if isinstance(value, str) and is_missing(value, self._keep) else value

    def _text(self) -> Iterator[tuple[int, Columns]]:
        with read_ahead(self._path) as raw:
            self._opened = raw
            # Buffered, so that peek can inspect the header without consuming it.
            text = io.BufferedReader(TextStream(raw), _HEADER_BYTES)
            head = text.peek()
            declared = _SEPARATOR_LINE.match(head)
            if declared:
                text.readline()
            separator = declared[1].decode("latin-1") if declared else self._separator(head)
            rows = csv_rows(text, self._path, separator)
            header = next(rows, [])
            indices = {name: header.index(name) for name in self._columns(header)} if header else {}
            for part in iter(lambda: list(islice(rows, PART_ROWS)), []):
                columns = list(zip(*part, strict=True))
                yield len(part), {name: columns[index] for name, index in indices.items()}
            self.finished = [raw.source_file()]

    def _separator(self, head: bytes) -> str:
        """Return the separator that gives the most wanted columns, then the most columns, then fits the file's name.

        Raises DataError for a file of another kind.
        """
        of_name = "\t" if ".tsv" in self._path.name.lower() else ","
        lines = head.decode("utf-8-sig", errors="replace").splitlines()
        tables = {mark: csv.reader(lines, delimiter=mark) for mark in _SEPARATORS}
        headers = {mark: next(filter(None, rows), []) for mark, rows in tables.items()}  # the first row with fields
        wanted = {mark: len(self.wanted.keys() & set(header)) for mark, header in headers.items()}
        most = max(_SEPARATORS, key=lambda mark: (wanted[mark], len(headers[mark]), mark == of_name))
        # A header may start like another file format, but then it has wanted columns.
        kind = None if wanted[most] else kind_of(self._path, "table")
        if kind is not None:
            raise DataError(f"{self._path}: {kind}")
        return most

    def _parquet(self) -> Iterator[tuple[int, Columns]]:
        try:
            with pq.ParquetFile(self._path) as file:
                columns = self._columns(file.schema_arrow.names)
                for batch in file.iter_batches(PART_ROWS, columns=columns, use_threads=False):
                    batch.validate(full=True)  # detects texts that are not UTF-8, among others
                    yield batch.num_rows, batch.to_pydict()
        except (pa.ArrowException, UnicodeDecodeError) as error:
            remedy = kind_of(self._path, "Parquet") or "build or copy it again"
            raise DataError(f"{self._path}: not Parquet, or damaged ({first_line(error)}); {remedy}") from error
        self.finished = [SourceFile.of(self._path)]  # hashed separately, because Parquet is not read sequentially

    def _columns(self, header: list[str]) -> list[str]:
        """Return the columns to read. Raises DataError for a header that lacks a column or repeats it."""
        self.header = header
        columns = [name for name, setting in self.wanted.items() if name in header or setting is not None]
        for name in columns:
            setting = self.wanted[name]
            if header.count(name) > 1:
                where = f" ({setting})" if setting else ""
                raise DataError(f"{self._path}: {header.count(name)} columns are named {name!r}{where}; rename them")
            if name not in header:
                raise DataError(f"{self._path}: {self._without(name, setting or '', header)}")
        return columns

    def _without(self, name: str, setting: str, header: list[str]) -> str:
        """Describe a missing column and its alternatives. Id columns are suggested only for ids, and vice versa."""
        takes_ids = setting.endswith("id_column")
        free = [
            column[:_SHOWN_LETTERS]
            for column in header
            if column not in self.wanted and takes_ids == bool(_ID_NAME.fullmatch(column))
        ]
        # For labels there is no clue which column is meant.
        likely = free if setting.endswith(("id_column", "text_column")) else []
        near = difflib.get_close_matches(name, free, n=1) or likely
        example = f", e.g. --{setting} {shlex.quote(near[0])}" if near else ""
        remedy = f": set {setting}{example}" if setting else "; rename one"
        if any(map(_DATA.fullmatch, header)):
            remedy = "; its first row looks like values: add a row of names above it"
        shown = ", ".join(repr(column[:_SHOWN_LETTERS]) for column in header[:_SHOWN])
        more = f" and {len(header) - _SHOWN:,} more" if len(header) > _SHOWN else ""
        return f"no column {name!r}{did_you_mean(name, free)}; it has {shown}{more}{remedy}"


def csv_rows(text: IO[bytes], path: Path, separator: str) -> Iterator[list[str]]:
    """Yield the header and the rows of a CSV or TSV, without blank lines.

    ``path`` is for messages. Raises DataError for rows of different lengths, stray quotes, and text that is not UTF-8.
    """
    csv.field_size_limit(_LONGEST_TEXT)  # global in the process; the default of 131,072 characters is too low for texts
    # Strict: otherwise a stray quote starts a value that extends over rows to the next quote.
    reader = csv.reader(_decoded(text, path, newline=""), delimiter=separator, strict=True)
    number = -1
    length = 0
    try:
        for number, row in enumerate(filter(None, reader)):
            _check_utf8("".join(row), f"{path}, row {number}")
            length = length or len(row)
            if len(row) != length:
                raise DataError(
                    f"{path}, row {number}: {len(row)} fields, but the header has {length}; complete the row, "
                    "or quote fields that contain the separator"
                )
            yield row
    except csv.Error as error:
        raise DataError(
            f"{path}, row {number + 1}: not CSV: {error}; quote fields that contain quotes, and double the inner ones"
        ) from error


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number, from 1, and text of each line of a file, plain or compressed, without its end.

    Raises DataError if the file can't be read or is not UTF-8.
    """
    with reading(path), read_ahead(path) as raw:
        for number, line in enumerate(_decoded(io.BufferedReader(TextStream(raw)), path), 1):
            _check_utf8(line, f"{path}, line {number}")
            yield number, line.removesuffix("\n")


def _decoded(text: IO[bytes], path: Path, newline: str | None = None) -> Iterator[str]:
    """Yield lines with their ends. Raises DataError for a line that is too long, without reading all of it."""
    # Invalid bytes become surrogates, so that the error can name their row.
    lines = io.TextIOWrapper(text, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
    for line in iter(partial(lines.readline, _LONGEST_TEXT), ""):
        if len(line) == _LONGEST_TEXT:
            raise DataError(f"{path}: a line has {_LONGEST_TEXT:,} characters or more; is it the right file?")
        yield line


def _check_utf8(text: str, place: str) -> None:
    if not text.isascii() and _SURROGATE.search(text):
        raise DataError(f"{place}: not UTF-8 text; save the file as UTF-8")
