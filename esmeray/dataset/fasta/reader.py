"""Read FASTA files into batches of raw records, and report errors with file, line and record.

In: names of files (plain, gzip, bzip2, xz, zstd), folders and globs. Out: :class:`RecordBatch`, headers and sequences
as they are in the files.

A background thread reads, hashes and decompresses a file one chunk ahead of the parser. These steps release the GIL,
so on two cores they cost almost nothing. The compiled parser of :mod:`esmeray.dataset.fasta.records` handles text with
a plain layout. From the first text that is not plain, the rest of the file is parsed by lines.

:mod:`esmeray.dataset.store.ingest` validates sequences and ids.
"""

import glob
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash
from xopen import xopen

from esmeray.common.background_thread import BackgroundThread
from esmeray.common.errors import DataError, reading
from esmeray.common.remote import local_path
from esmeray.dataset.fasta.counts import IngestCounts, SourceFile
from esmeray.dataset.fasta.locate import (
    BYTE_ORDER_MARK,
    COMMENT,
    DECOMPRESSION_ERRORS,
    damage,
    kind_of,
    pieces_of_lines,
    place_of_line,
    place_of_record,
)
from esmeray.dataset.fasta.records import PlainFasta, Records, load_kernel

SUFFIXES = (".fasta", ".fa", ".faa", ".fas", ".fsa", ".pep", ".mpfa")
COMPRESSIONS = ("", ".gz", ".bz2", ".xz", ".zst")

BATCH_BYTES = 256 * 1024
"""A batch ends when its headers and sequences have this many bytes. A block of a store is one batch."""

MAX_RESIDUES = 1_000_000
"""Maximum of residues per record and of characters per line. Titin, the longest human protein, has 35,000 residues."""

CHUNK_BYTES = 384 * 1024
"""Size of a chunk of text: a little more than a batch, so that most chunks are one batch."""

_BUFFER_BYTES = 256 * 1024
_RECORDS_AT_ONCE = 256
_NO_HEADER = "text before the first header; a FASTA file starts with '>' and an id"


def is_fasta_name(path: Path) -> bool:
    """Return whether the name has a suffix of FASTA files."""
    return path.name.lower().endswith(tuple(suffix + ending for suffix in SUFFIXES for ending in COMPRESSIONS))


class ReadAhead:
    """The text of one file, read once, one chunk ahead of the parser; :func:`read_ahead` opens it."""

    def __init__(
        self, path: Path, raw: "_HashedFile", decompressed: BinaryIO, thread: BackgroundThread[tuple[memoryview, int]]
    ) -> None:
        """Start reading. ``decompressed`` is the text of ``raw``."""
        self.bytes_read = 0  # bytes on disk of the chunks taken so far
        self._path = path
        self._raw = raw
        self._status = os.fstat(raw.fileno())
        self._decompressed = decompressed
        self._thread = thread
        # Two buffers, allocated once: one is parsed while the other is filled.
        self._buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(2)]
        self._begin()

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self.read_chunk, b"")

    def read_chunk(self) -> memoryview:
        """Return the next chunk, empty at the end. It is valid until the next call.

        Raises OSError if the file can't be read, DataError if its compression is damaged.
        """
        try:
            text, self.bytes_read = self._thread.wait()
        except DECOMPRESSION_ERRORS as error:
            if getattr(error, "errno", None) is not None:
                raise  # an error of the system, not of a decompressor
            raise DataError(damage(self._path, error)) from error
        if text:
            self._begin()  # fill the other buffer while this one is parsed
        return text

    def source_file(self) -> SourceFile:
        """Describe the file as it was read. Call this after the end of the file."""
        return SourceFile.of(self._path, self._status, self._raw.checksum.hexdigest())

    def _begin(self) -> None:
        self._buffers.reverse()  # the buffer that the caller has stays unchanged until the next call
        self._thread.begin(partial(self._fill, self._buffers[0]))

    def _fill(self, buffer: memoryview) -> tuple[memoryview, int]:
        # Fill the whole buffer: a decompressor returns little at a time, and the parser is fastest with large chunks.
        size = 0
        while size < len(buffer) and (count := self._decompressed.readinto(buffer[size:])):  # type: ignore[attr-defined]
            size += count
        if not size:  # read to the end: the checksum includes bytes after the compressed data
            while self._raw.readinto(buffer):
                pass
        return buffer[:size], self._raw.tell()


@contextmanager
def read_ahead(path: Path) -> Iterator[ReadAhead]:
    """Open a file and start reading. Raises OSError if it can't be read."""
    # threads=0: xopen decompresses in this process, so that a truncated file raises an error.
    with (
        _HashedFile(str(path)) as raw,
        xopen(io.BufferedReader(raw, _BUFFER_BYTES), "rb", threads=0) as decompressed,
        closing(BackgroundThread[tuple[memoryview, int]]()) as thread,
    ):
        yield ReadAhead(path, raw, decompressed, thread)


class TextStream(io.RawIOBase):
    """The rest of a file's text as a stream: first the unparsed text, then the remaining chunks."""

    def __init__(self, text: ReadAhead, unused: bytes = b"") -> None:
        self._text = text
        self._waiting = memoryview(unused)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        chunk = self._waiting or self._text.read_chunk()
        size = min(len(chunk), len(buffer))
        buffer[:size], self._waiting = chunk[:size], chunk[size:]
        return size


class _HashedFile(io.FileIO):
    """A file that is hashed while it is read, so that the checksum needs no second read.

    xopen recognizes the compression by the suffix of the name, or by the content if there is no suffix.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.checksum = xxhash.xxh3_128()

    def readinto(self, buffer) -> int:
        num_bytes = super().readinto(buffer) or 0
        self.checksum.update(memoryview(buffer)[:num_bytes])
        return num_bytes


class Origin(NamedTuple):
    """Origin of the records of a batch from ``start`` on: the file, and the number of the first in it, from 1."""

    start: int
    path: Path
    number: int


@dataclass(frozen=True)
class RecordBatch:
    """Raw records and their origins. ``origins`` is empty if they were not read from a file."""

    records: Records
    origins: list[Origin] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.records)

    def origin(self, index: int) -> tuple[Path, int] | None:
        """Return a record's file and its number in the file, from 1; None if it was not read from a file."""
        origin = next((origin for origin in reversed(self.origins) if origin.start <= index), None)
        return None if origin is None else (origin.path, origin.number + index - origin.start)

    def location(self, index: int, residue: int | None = None) -> str:
        """Return file, line and record of a record, or of one of its residues, for a message."""
        origin = self.origin(index)
        if origin is None:
            name = self.records.headers.split()[index].decode("utf-8")
            return f"record {name!r}" if residue is None else f"record {name!r}, residue {residue + 1}"
        return place_of_record(*origin, residue)


class FastaSource:
    """The files of a source, read once in order."""

    def __init__(self, sources: list[str], counts: IngestCounts | None = None) -> None:
        """Find the files. Comments are counted in ``counts``.

        Raises DataError if a name is no file, folder or glob with FASTA files.
        """
        self.paths = find_files(sources)
        self.files_ignored = files_ignored(sources)
        self.bytes_total = sum(path.stat().st_size for path in self.paths)
        self.kernel = load_kernel()  # once for all files: folders may hold thousands
        self.finished: list[SourceFile] = []
        self.counts = counts or IngestCounts()
        self._opened: ReadAhead | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes on disk of the text that was parsed so far."""
        return sum(file.bytes for file in self.finished) + (self._opened.bytes_read if self._opened else 0)

    def batches(self) -> Iterator[RecordBatch]:
        """Yield batches of at least :data:`BATCH_BYTES`, except the last. Batches span files.

        Raises DataError if a file can't be read, is truncated or is not FASTA, after the records before the error.
        """
        parts: list[Records] = []
        origins: list[Origin] = []
        num_records = num_bytes = 0
        try:
            # Batches span files, so that a folder of a thousand small files does not become a thousand small blocks.
            for path in self.paths:
                number = 1
                for records in self._records(path):
                    parts.append(records)
                    origins.append(Origin(num_records, path, number))
                    number += len(records)
                    num_records += len(records)
                    num_bytes += records.text_bytes
                    if num_bytes >= BATCH_BYTES:
                        yield RecordBatch(Records.joined(parts), origins)
                        parts, origins = [], []
                        num_records = num_bytes = 0
                # Report an empty file: among many files, a failed download would otherwise go unnoticed.
                if number == 1:
                    raise DataError(
                        f"{path}: no FASTA records (the file is empty, or has only blank lines and comments); "
                        "give a FASTA file"
                    )
        except DataError:
            if parts:
                yield RecordBatch(Records.joined(parts), origins)  # before the error, as in _parsed
            raise
        if parts:
            yield RecordBatch(Records.joined(parts), origins)

    def once_more(self) -> Iterator[RecordBatch]:
        """Yield the batches again, which are counted nowhere."""
        again = copy(self)
        again.finished, again.counts = [], IngestCounts()
        return again.batches()

    def _records(self, path: Path) -> Iterator[Records]:
        with reading(path), read_ahead(path) as text:
            self._opened = text
            yield from self._parsed(path, text)
            self.finished.append(text.source_file())
            self._opened = None  # its bytes now count with the finished files

    def _parsed(self, path: Path, text: ReadAhead) -> Iterator[Records]:
        unparsed = b""
        num_records = 0
        if self.kernel is not None:
            plain = PlainFasta(self.kernel, MAX_RESIDUES)
            for plain_records in plain.records(text):
                num_records += len(plain_records)
                yield plain_records
            unparsed = plain.unparsed
            if not unparsed:  # all of the file was plain
                return
        pending: list[tuple[bytes, bytes]] = []
        try:
            for record in self._records_by_lines(TextStream(text, unparsed), path, num_records):
                pending.append(record)
                if len(pending) == _RECORDS_AT_ONCE:
                    yield Records.of(pending)
                    pending = []
        except (DataError, OSError):
            if pending:
                yield Records.of(pending)  # before the error, since they may have faults to report, too
            raise
        if pending:
            yield Records.of(pending)

    def _records_by_lines(self, text: io.RawIOBase, path: Path, number: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield header and sequence of each record after the first ``number``. Comments are counted.

        Raises DataError at the first invalid line.
        """
        header: str | None = None  # None before the first header: the message then suggests another file format
        parts: list[str] = []
        num_residues = 0
        # One for '>' or one residue too many, one for the line feed. A piece of this length is part of a line too long.
        longest = MAX_RESIDUES + 2
        for raw in pieces_of_lines(io.BufferedReader(text, _BUFFER_BYTES), longest):
            # Windows editors put a byte-order mark before the first line.
            line = raw.removeprefix(BYTE_ORDER_MARK) if header is None else raw
            stripped = line.strip()
            starts_record = stripped.startswith(">")
            if starts_record and header is not None:
                yield header.encode("ascii"), "".join(parts).encode("ascii")
            problem = _problem(line, in_record=header is not None)
            if problem is not None:
                raise _refusal(path, problem, in_record=header is not None)
            if starts_record:
                header = stripped[1:]
                parts = []
                num_residues = 0
                number += 1
            elif stripped.startswith(COMMENT):
                self.counts.comment_lines += 1
            elif stripped:
                parts.append(stripped)
                num_residues += len(stripped)
            # Check while reading, so that a record far too long for a protein takes no memory.
            if num_residues > MAX_RESIDUES or (len(raw) == longest and not raw.endswith("\n")):
                raise DataError(
                    f"{place_of_record(path, number)}: a record or header longer than {MAX_RESIDUES:,} "
                    "characters; split it, or remove it"
                )
        if header is not None:
            yield header.encode("ascii"), "".join(parts).encode("ascii")


def _refusal(path: Path, problem: str, in_record: bool) -> DataError:
    # The file is read again to find the line number. Files without errors need no line numbers.
    kind = None if in_record else kind_of(path, "FASTA")
    return DataError(f"{place_of_line(path, lambda line: _problem(line, in_record) == problem)}: {kind or problem}")


def _problem(line: str, in_record: bool) -> str | None:
    """Return the reason why a line is invalid in FASTA, or None."""
    start = line.lstrip()[:1]
    if not in_record and start not in ("", ">", COMMENT):
        return _NO_HEADER
    if not line.isascii():
        return "contains a non-ASCII character; replace it with an ASCII letter"
    if "\0" in line:
        return "contains a NUL byte; the file is damaged or not text"
    return "starts with '#'; FASTA comments start with ';', so remove the line or use ';'" if start == "#" else None


def find_files(
    sources: Sequence[str],
    is_wanted: Callable[[Path], bool] = is_fasta_name,
    kind: str = f"FASTA file ({', '.join(SUFFIXES)}, plain or compressed)",
) -> list[Path]:
    """Return the files that names, folders (searched recursively) and globs stand for, each once, in order.

    A folder contributes the files with a wanted name. ``kind`` is their name in messages. Raises DataError if a name
    matches no file.
    """
    files: dict[Path, Path] = {}  # keyed by the resolved path: two globs or a link may name one file twice
    for source in sources:
        with reading(Path(source)):
            for path in _expand(source, is_wanted, kind):
                files.setdefault(path.resolve(), path)
    return list(files.values())


def files_ignored(sources: Sequence[str], is_wanted: Callable[[Path], bool] = is_fasta_name) -> dict[str, int]:
    """Count the files by name that :func:`find_files` ignores in folders.

    After the first few, files are counted together as 'others'. Files of systems and editors, e.g. .DS_Store, are not
    counted.
    """
    folders = [path for path in map(local_path, sources) if path.is_dir()]
    names = [name for folder in folders for name in _files_of_folder(folder, is_wanted)[1]]
    shown = sorted(names)[:5]
    counts = dict(Counter(shown))
    if len(names) > len(shown):
        counts["others"] = len(names) - len(shown)
    return counts


def _files_of_folder(folder: Path, is_wanted: Callable[[Path], bool]) -> tuple[list[Path], list[str]]:
    """Return the files of a folder to read, and the names of the ignored ones.

    Hidden files and folders (._name, .ipynb_checkpoints) come from editors and systems and are not read.
    """
    files: list[Path] = []
    ignored: list[str] = []
    for path in filter(Path.is_file, sorted(folder.rglob("*"))):
        name = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in name.parts)
        if is_wanted(path) and not is_hidden:
            files.append(path)
        elif is_wanted(path) or not is_hidden:  # other hidden files are not even counted
            ignored.append(str(name))
    return files, ignored


def _expand(source: str, is_wanted: Callable[[Path], bool], kind: str) -> list[Path]:
    path = local_path(source)
    if path.is_dir():
        files, _ = _files_of_folder(path, is_wanted)
        if not files:
            others = ", ".join(files_ignored([source], is_wanted)) or "no files"
            raise DataError(f"{source}: no {kind} in the folder; it has {others}")
        return files
    # Checked before globs: a file name may have glob characters, e.g. set[1].fasta.
    if path.is_file():
        return [path]
    if path.exists():
        raise DataError(
            f"{source}: not a regular file or folder; pipes and devices can't be read twice, so save the data to a file"
        )
    # glob.glob instead of Path.glob, because the pattern may be absolute.
    files = sorted(path for path in map(Path, glob.glob(source, recursive=True)) if path.is_file())  # noqa: PTH207
    if not files:
        raise DataError(f"{source}: no {'file matches' if glob.has_magic(source) else 'such file or folder'}")
    return files
