"""FASTA files to batches of raw records, with every refusal placed: file, line and record.

In: names of files (plain, gzip, bzip2, xz, zstd), folders and globs. Out: :class:`RecordBatch`, headers and sequences
as they stand in the files. Left to :mod:`dataset.ingest`: what a sequence and an id may be.

xopen decompresses, dnaio parses. Between the two sits a stream that looks at every byte, because dnaio 1.2 decodes by
the locale and skips lines that start with '#', even inside a record. ``threads=0`` decompresses in this process, where
a truncated file is an error. Line numbers are found by reading the file again, once something is known to be wrong.
"""

from __future__ import annotations

import glob
import hashlib
import io
import lzma
import os
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import dnaio
from dnaio.exceptions import FileFormatError
from xopen import xopen

from dataset.store_format import SourceFile
from train_config.errors import DataError

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdError
else:
    from backports.zstd import ZstdError

SUFFIXES = (".fasta", ".fa", ".faa", ".fas", ".fsa", ".pep", ".mpfa")
COMPRESSIONS = ("", ".gz", ".bz2", ".xz", ".zst")

BATCH_RESIDUES = 256 * 1024
BATCH_RECORDS = 8192
"""A batch ends when it holds this much; a store's block is one batch."""

_RECORDS_AT_ONCE = 32
_CHUNK_BYTES = 256 * 1024
_BOM = b"\xef\xbb\xbf"
_COMMENT_LINE = re.compile(rb"[\r\n][\t\x0b\x0c\x1c-\x1f ]*#")
# zlib.error and isal's IsalError are what a flipped bit inside the compressed data raises.
_DECOMPRESSION_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, ZstdError)


class Origin(NamedTuple):
    """Where the records of a batch from ``start`` on were read.

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
    """Raw records: header lines without '>' and sequences without line breaks, ASCII alone.

    Attributes:
        origins: where they came from, in order; empty for records that were not read from a file.
    """

    headers: list[str]
    sequences: list[str]
    origins: list[Origin] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.headers)

    def place(self, index: int, residue: int | None = None) -> str:
        """File, line and record of one record, or of one of its residues, for a message."""
        # From the end: a file that fills no batch shares its start with the one after it.
        origin = next((origin for origin in reversed(self.origins) if origin.start <= index), None)
        if origin is None:
            return f"record {self.headers[index]!r}"
        return place_of_record(origin.path, origin.number + index - origin.start, residue)


class FastaSource:
    """The files of a source, read once from first to last."""

    def __init__(self, sources: list[str]) -> None:
        """Find the files.

        Raises:
            DataError: a name is no file, folder or glob that holds FASTA.
        """
        self.paths = find_files(sources)
        self.bytes_total = sum(path.stat().st_size for path in self.paths)
        self.bytes_read = 0
        self.finished: list[SourceFile] = []

    def batches(self) -> Iterator[RecordBatch]:
        """Batches of at least :data:`BATCH_RESIDUES` residues (the last excepted), running on from file to file.

        Raises:
            DataError: a file can't be read, is truncated or is not FASTA.
        """
        headers: list[str] = []
        sequences: list[str] = []
        origins: list[Origin] = []
        residues = 0
        for path in self.paths:
            number = 1
            origins.append(Origin(len(headers), path, number))
            records = self._records(path)
            while some := list(islice(records, _RECORDS_AT_ONCE)):
                headers += [record.name for record in some]
                read = [record.sequence for record in some]
                sequences += read
                residues += sum(map(len, read))
                number += len(some)
                if residues >= BATCH_RESIDUES or len(headers) >= BATCH_RECORDS:
                    yield RecordBatch(headers, sequences, origins)
                    headers, sequences, origins, residues = [], [], [Origin(0, path, number)], 0
            if number == 1:
                raise DataError(f"{path}: holds no records, only blank lines or nothing; give a FASTA file")
        if headers:
            yield RecordBatch(headers, sequences, origins)

    def _records(self, path: Path) -> Iterator[dnaio.SequenceRecord]:
        with _reading(path), path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            raw = _CountedFile(file, self._count)
            with xopen(io.BufferedReader(raw, _CHUNK_BYTES), "rb", threads=0) as decompressed:
                checked = io.BufferedReader(_CheckedStream(decompressed, path), _CHUNK_BYTES)
                yield from dnaio.FastaReader(checked)
            while raw.read(_CHUNK_BYTES):  # what stands after the end of the compressed data belongs to the checksum
                pass
        digest = raw.sha256.hexdigest()
        self.finished.append(
            SourceFile(path=str(path.resolve()), bytes=status.st_size, mtime_ns=status.st_mtime_ns, sha256=digest)
        )

    def _count(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes


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
    """Whether the name ends like a FASTA file's."""
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


class _CountedFile(io.RawIOBase):
    """The file as it lies on disk: counts the bytes for the progress bar and hashes them."""

    def __init__(self, file: io.FileIO, count: Callable[[int], None]) -> None:
        self._file = file
        self._count = count
        self.name = str(file.name)
        self.sha256 = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        num_bytes = self._file.readinto(buffer) or 0
        self.sha256.update(memoryview(buffer)[:num_bytes])
        self._count(num_bytes)
        return num_bytes


class _CheckedStream(io.RawIOBase):
    """The decompressed bytes, each looked at before dnaio sees it; a byte order mark is dropped.

    Raises (from ``readinto``):
        DataError: damaged compression, no '>' at the start, a byte outside ASCII, a NUL, a line that starts with '#'.
    """

    def __init__(self, decompressed: BinaryIO, path: Path) -> None:
        self._decompressed = decompressed
        self._path = path
        self._waiting = b""
        self._at_start = True
        self._started = False
        self._line_start = b"\n"

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        chunk = self._waiting or self._read(len(buffer))
        if self._at_start:
            self._at_start = False
            while 0 < len(chunk) < len(_BOM) and (more := self._read(len(_BOM))):
                chunk += more
            chunk = chunk.removeprefix(_BOM) or self._read(len(buffer))
        chunk, self._waiting = chunk[: len(buffer)], chunk[len(buffer) :]
        self._check(chunk)
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def _read(self, size: int) -> bytes:
        try:
            return self._decompressed.read(size)
        except _DECOMPRESSION_ERRORS as error:
            if getattr(error, "errno", None) is not None:
                raise  # the system's own refusal, not a decompressor's
            raise DataError(_damaged(self._path, error)) from error

    def _check(self, chunk: bytes) -> None:
        if not self._started:
            self._check_start(chunk)
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


def _damaged(path: Path, error: Exception) -> str:
    place = _last_place(path)
    if isinstance(error, EOFError):
        return f"{path}: the compressed file is truncated {place}; copy or download it again"
    if place.startswith("before"):
        kind = path.suffix.lstrip(".") or "compressed"
        return f"{path}: not a {kind} file in spite of its name, or damaged ({error}); rename it or download it again"
    return f"{path}: the compressed data is damaged {place} ({error}); copy or download it again"


class _Line(NamedTuple):
    number: int
    record: int
    record_id: str
    text: str


def _scan(path: Path) -> Iterator[_Line]:
    """Every line with its number and the record that it belongs to, as far as the file can be read.

    Splits lines as dnaio does, at \\n, \\r and \\r\\n; Latin-1 decodes any byte to itself.
    """
    record, record_id = 0, ""
    try:
        with xopen(path, "rb", threads=0) as file:
            for number, raw in enumerate(io.TextIOWrapper(file, encoding="latin-1"), start=1):
                text = raw.removeprefix(_BOM.decode("latin-1")) if number == 1 else raw
                if text.lstrip().startswith(">"):
                    record += 1
                    record_id = (text.strip()[1:].split(None, 1) or [""])[0]
                yield _Line(number, record, record_id, text)
    except _DECOMPRESSION_ERRORS:
        return  # the caller is already reporting that damage; what was read so far is what it wants to name


def _in_record(line: _Line) -> str:
    name = f" {line.record_id!r}" if line.record_id else ""
    return f", record {line.record}{name}" if line.record else ""


def place_of_line(path: Path, test: Callable[[str], bool]) -> str:
    """File, line and record of the first line that passes the test."""
    found = next((line for line in _scan(path) if test(line.text)), None)
    return str(path) if found is None else f"{path}, line {found.number}{_in_record(found)}"


def place_of_record(path: Path, number: int, residue: int | None = None) -> str:
    """File, line and id of the record with this number (from 1), or of the line that holds one of its residues.

    Args:
        residue: index in the sequence as it was read, from 0.
    """
    seen = -1
    for line in _scan(path):
        if line.record < number:
            continue
        text = line.text.strip()
        if seen < 0:
            seen = 0
            if residue is None:
                return f"{path}, line {line.number}{_in_record(line)}"
            continue
        if residue is not None and seen <= residue < seen + len(text):
            return f"{path}, line {line.number}, column {residue - seen + 1}{_in_record(line)}"
        seen += len(text)
    return f"{path}, record {number}"


def place_of_id(paths: list[Path], record_id: str) -> str | None:
    """File, line and record of the first record with this id."""
    for path in paths:
        for line in _scan(path):
            if line.record_id == record_id and line.text.lstrip().startswith(">"):
                return f"{path}, line {line.number}"
    return None


def _last_place(path: Path) -> str:
    last = next(iter(deque(_scan(path), maxlen=1)), None)
    return "before the first line" if last is None else f"after line {last.number}{_in_record(last)}"
