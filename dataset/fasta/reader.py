"""FASTA files to batches of raw records, with every refusal placed: file, line and record.

In: names of files (plain, gzip, bzip2, xz, zstd), folders and globs. Out: :class:`RecordBatch`, headers and sequences
as they stand in the files. Left to :mod:`dataset.store.ingest`: what a sequence and an id may be.

:mod:`dataset.fasta.read_ahead` reads and decompresses, :mod:`dataset.fasta.plain_fasta` parses what is laid out
plainly, where there is a C++ compiler. From the first text that is not plain, dnaio parses the rest of the file. Before
dnaio sits a stream that looks at every byte, because dnaio 1.2 decodes by the locale and skips lines that start with
'#', even inside a record. Line numbers are found by :mod:`dataset.fasta.locate`, once something is known to be wrong.
"""

from __future__ import annotations

import glob
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import dnaio
import numpy as np
from dnaio.exceptions import FileFormatError

from common.errors import DataError
from dataset.fasta.kernel import load_kernel
from dataset.fasta.locate import BYTE_ORDER_MARK, place_of_line, place_of_record
from dataset.fasta.plain_fasta import PlainFasta
from dataset.fasta.read_ahead import ReadAhead, TextStream
from dataset.fasta.records import Records
from dataset.fasta.source_file import SourceFile

SUFFIXES = (".fasta", ".fa", ".faa", ".fas", ".fsa", ".pep", ".mpfa")
COMPRESSIONS = ("", ".gz", ".bz2", ".xz", ".zst")

BATCH_RESIDUES = 256 * 1024
BATCH_RECORDS = 8192
"""A batch ends when it holds this much; a store's block is one batch."""

_LARGEST_BATCH = 1.5
"""Residues that were parsed at once stay together up to this many times :data:`BATCH_RESIDUES`: cutting takes time."""

_RECORDS_AT_ONCE = 256
_CHUNK_BYTES = 256 * 1024
_COMMENT_LINE = re.compile(rb"[\r\n][\t\x0b\x0c\x1c-\x1f ]*#")
_NOT_TEXT = re.compile(rb"[\0\x80-\xff]")


class Origin(NamedTuple):
    """Place where the records of a batch from ``start`` on were read.

    Attributes:
        start: index in the batch.
        path: the file.
        number: number in the file, from 1, of the record at ``start``.
    """

    start: int
    path: Path
    number: int


@dataclass(frozen=True)
class RecordBatch:
    """Raw records and where they came from.

    Attributes:
        records: the records.
        origins: where they came from, in order; empty for records that were not read from a file.
    """

    records: Records
    origins: list[Origin] = field(default_factory=list)

    @classmethod
    def of(cls, headers: list[bytes], sequences: list[bytes]) -> RecordBatch:
        """Records that were not read from a file."""
        return cls(Records.of(headers, sequences))

    def __len__(self) -> int:
        return len(self.records)

    @property
    def headers(self) -> list[bytes]:
        """Header lines without '>'."""
        return self.records.headers.split()

    @property
    def sequences(self) -> list[bytes]:
        """Sequences without line breaks."""
        return self.records.sequences

    def origin(self, index: int) -> tuple[Path, int] | None:
        """File of a record and its number in it, from 1; None where it was not read from FASTA."""
        # From the end: a file that fills no batch shares its start with the one after it.
        origin = next((origin for origin in reversed(self.origins) if origin.start <= index), None)
        return None if origin is None else (origin.path, origin.number + index - origin.start)

    def place(self, index: int, residue: int | None = None) -> str:
        """File, line and record of one record, or of one of its residues, for a message."""
        origin = self.origin(index)
        if origin is None:
            return f"record {self.headers[index].decode('utf-8')!r}"
        path, number = origin
        return place_of_record(path, number, residue)


class FastaSource:
    """The files of a source, read once from first to last."""

    def __init__(self, sources: list[str]) -> None:
        """Find the files.

        Raises:
            DataError: a name is no file, folder or glob that holds FASTA.
        """
        self.paths = find_files(sources)
        self.bytes_total = sum(path.stat().st_size for path in self.paths)
        self.kernel = load_kernel()
        self.finished: list[SourceFile] = []
        self._bytes_finished = 0
        self._opened: ReadAhead | None = None
        self._damage: DataError | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes of the files, as they lie on disk, that went into what was parsed so far."""
        return self._bytes_finished + (self._opened.bytes_read if self._opened else 0)

    def batches(self) -> Iterator[RecordBatch]:
        """Batches of at least :data:`BATCH_RESIDUES` residues (the last excepted), running on from file to file.

        Raises:
            DataError: a file can't be read, is truncated or is not FASTA; after the records that stand before that.
        """
        parts: list[Records] = []
        origins: list[Origin] = []
        num_records = num_residues = 0
        for path in self.paths:
            number = 1
            origins.append(Origin(num_records, path, number))
            for records in self._records(path):
                ends_N = np.cumsum(records.lengths, dtype=np.int64)
                start, done = 0, 0
                while start < len(records):
                    end = start + BATCH_RECORDS - num_records
                    if num_residues or not BATCH_RESIDUES <= ends_N[-1] - done <= _LARGEST_BATCH * BATCH_RESIDUES:
                        end = min(end, int(np.searchsorted(ends_N, done + BATCH_RESIDUES - num_residues)) + 1)
                    end = min(end, len(records))
                    parts.append(records.part(start, end))
                    number += end - start
                    num_records += end - start
                    num_residues += int(ends_N[end - 1]) - done
                    start, done = end, int(ends_N[end - 1])
                    if num_residues >= BATCH_RESIDUES or num_records >= BATCH_RECORDS:
                        yield RecordBatch(Records.joined(parts), origins)
                        parts, origins = [], [Origin(0, path, number)]
                        num_records = num_residues = 0
            if number == 1 and self._damage is None:
                self._damage = DataError(f"{path}: holds no records, only blank lines or nothing; give a FASTA file")
            if self._damage is not None:
                break
        if parts:
            yield RecordBatch(Records.joined(parts), origins)
        if self._damage is not None:
            raise self._damage

    def _records(self, path: Path) -> Iterator[Records]:
        """The records of a file up to its end, or to what can't be read, which is kept until these are given out."""
        try:
            with _reading(path), ReadAhead(path) as text:
                self._opened = text
                yield from self._parsed(path, text)
                self.finished.append(text.source_file())
                self._bytes_finished += text.bytes_read
                self._opened = None
        except DataError as error:
            self._damage = error

    def _parsed(self, path: Path, text: ReadAhead) -> Iterator[Records]:
        if self.kernel is None:
            yield from _unusual_records(_CheckedStream(TextStream(text), path))
            return
        plain = PlainFasta(self.kernel)
        records: Records | None = None
        for chunk in text:
            records = plain.feed(chunk)
            if records is None:
                break
            yield records
        else:
            records = plain.finish()
            if records is not None:
                yield records
        if records is None:
            yield from _unusual_records(_CheckedStream(TextStream(text, plain.unparsed()), path))


def _unusual_records(checked: _CheckedStream) -> Iterator[Records]:
    reader = iter(dnaio.FastaReader(io.BufferedReader(checked, _CHUNK_BYTES)))
    problem: Exception | None = None
    while problem is None:
        some: list[dnaio.SequenceRecord] = []
        try:
            some.extend(islice(reader, _RECORDS_AT_ONCE))
        except (DataError, FileFormatError, OSError) as error:
            problem = error  # raised once the records before it are given out
        if not some:
            break
        headers = [record.name.encode("ascii") for record in some]
        sequences = [record.sequence.encode("ascii") for record in some]
        yield Records.of(headers, sequences)
    if problem is not None:
        raise problem


def find_files(sources: list[str]) -> list[Path]:
    """The FASTA files that names of files, folders (searched to any depth) and globs stand for, each once, in order.

    Raises:
        DataError: a name stands for nothing.
    """
    found: dict[Path, Path] = {}
    for source in sources:
        with _reading(Path(source)):
            for path in _expand(source):
                found.setdefault(path.resolve(), path)
    return list(found.values())


def is_fasta_name(path: Path) -> bool:
    """Return whether the name ends like a FASTA file's."""
    name = path.name.lower()
    return name.endswith(tuple(suffix + compression for suffix in SUFFIXES for compression in COMPRESSIONS))


def _expand(source: str) -> list[Path]:
    path = Path(source)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and is_fasta_name(p) and not p.name.startswith("."))
        if not files:
            raise DataError(f"{source}: the folder holds no FASTA file ({', '.join(SUFFIXES)}, plain or compressed)")
        return files
    if path.is_file():
        return [path]
    if path.exists():
        raise DataError(f"{source}: neither a file nor a folder; pipes and devices can't be read twice, save to a file")
    if glob.has_magic(source):
        names = glob.glob(source, recursive=True)  # noqa: PTH207 - the pattern may be absolute
        files = sorted(path for path in map(Path, names) if path.is_file())
        if not files:
            raise DataError(f"{source}: no file matches")
        return files
    raise DataError(f"{source}: no such file or folder")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Errors of the system and of the libraries, worded for the person who gave the file."""
    try:
        yield
    except FileFormatError as error:
        raise DataError(f"{path}: not FASTA: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from error


class _CheckedStream(io.RawIOBase):
    """The decompressed bytes, each looked at before dnaio sees it; a byte order mark is dropped.

    Raises (from ``readinto``):
        DataError: no '>' at the start, a byte outside ASCII, a NUL, a line that starts with '#'.
    """

    def __init__(self, decompressed: io.RawIOBase, path: Path) -> None:
        self._decompressed = decompressed
        self._path = path
        self._waiting = b""
        self._at_start = True
        self._started = False
        self._line_start = b"\n"
        self._problem: DataError | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        if self._problem is not None:
            raise self._problem
        chunk = self._waiting or self._read(len(buffer))
        if self._at_start:
            self._at_start = False
            while 0 < len(chunk) < len(BYTE_ORDER_MARK) and (more := self._read(len(BYTE_ORDER_MARK))):
                chunk += more
            chunk = chunk.removeprefix(BYTE_ORDER_MARK) or self._read(len(buffer))
        chunk, self._waiting = chunk[: len(buffer)], chunk[len(buffer) :]
        if not self._started:
            self._check_start(chunk)
        try:
            self._check(chunk)
        except DataError as error:
            self._problem = error  # for the next call: the records before it are read first
            chunk = self._before_problem(chunk)
            if not chunk:
                raise
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def _read(self, size: int) -> bytes:
        return self._decompressed.read(size) or b""

    def _check(self, chunk: bytes) -> None:
        if not chunk.isascii():
            self._refuse(lambda line: not line.isascii(), "holds a byte outside ASCII; write it with plain letters")
        if b"\0" in chunk:
            self._refuse(lambda line: "\0" in line, "holds a NUL byte; the file is damaged or not text")
        if b"#" in chunk and _COMMENT_LINE.search(self._line_start + chunk):
            self._refuse(lambda line: line.strip()[:1] == "#", "starts with '#'; FASTA has no comments, remove it")
        last_line = chunk[max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1 :]
        if len(last_line) < len(chunk):
            self._line_start = b"\n" + last_line
        else:
            self._line_start += last_line
        # Only the blanks before a '#' matter: a line with anything else in it can't become a comment.
        if self._line_start.strip():
            self._line_start = b"x"

    def _before_problem(self, chunk: bytes) -> bytes:
        """A refused chunk up to the record that is refused, and a header, at which dnaio gives the record before it."""
        not_text, comment = _NOT_TEXT.search(chunk), _COMMENT_LINE.search(self._line_start + chunk)
        starts = [not_text.start()] if not_text else []
        starts += [comment.end() - len(self._line_start) - 1] if comment else []
        sound = chunk[: min(starts)]
        header = sound.rfind(b">")
        return sound if header < 0 else sound[:header] + b">\n"

    def _check_start(self, chunk: bytes) -> None:
        start = chunk.lstrip()
        if not start:
            return
        self._started = True
        if start.startswith(b">"):
            return
        if start.startswith(b"@"):
            problem = "looks like FASTQ (it starts with '@'); convert it to protein FASTA"
        elif start.startswith(b"<"):
            problem = "looks like HTML or XML (it starts with '<'); was it saved from a web page?"
        else:
            problem = (
                "a FASTA file starts with '>' and an id; here a sequence or another format comes before any header"
            )
        self._refuse(lambda line: bool(line.strip()), problem)

    def _refuse(self, test: Callable[[str], bool], problem: str) -> None:
        raise DataError(f"{place_of_line(self._path, test)}: {problem}")
