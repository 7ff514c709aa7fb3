"""FASTA files to batches of raw records, with every refusal placed: file, line and record.

In: names of files (plain, gzip, bzip2, xz, zstd), folders and globs. Out: :class:`RecordBatch`, headers and sequences
as they stand in the files. :mod:`esmeray.dataset.fasta.kernel` parses what is laid out plainly; from the first text
that is not, the rest of the file is parsed by lines. Left to :mod:`esmeray.dataset.store.ingest`: what a sequence and
an id may be.
"""

import glob
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from esmeray.common.errors import DataError, reading
from esmeray.common.remote import local_path
from esmeray.dataset.fasta.counts import SourceFile
from esmeray.dataset.fasta.kernel import PlainFasta, load_kernel
from esmeray.dataset.fasta.locate import BYTE_ORDER_MARK, pieces_of_lines, place_of_line, place_of_record
from esmeray.dataset.fasta.read_ahead import ReadAhead, TextStream
from esmeray.dataset.fasta.records import Records
from esmeray.dataset.section import IngestSection

SUFFIXES = (".fasta", ".fa", ".faa", ".fas", ".fsa", ".pep", ".mpfa")
COMPRESSIONS = ("", ".gz", ".bz2", ".xz", ".zst")

BATCH_RESIDUES = 256 * 1024
BATCH_RECORDS = 8192
"""A batch ends when it holds this much; a store's block is one batch."""

MAX_RESIDUES = IngestSection().max_residues
"""Where no settings say otherwise."""

_BATCH_HEADER_BYTES = 16 << 20
"""More than any batch of real headers; it bounds the memory of one whose headers are long and sequences short."""

_LARGEST_BATCH = 1.5
"""Residues that were parsed at once stay together up to this many times :data:`BATCH_RESIDUES`: cutting takes time."""

_RECORDS_AT_ONCE = 256
_LINE_BUFFER_BYTES = 256 * 1024
_FIRST_LETTERS = {
    "@": "looks like FASTQ (it starts with '@'); convert it to protein FASTA",
    "<": "looks like HTML or XML (it starts with '<'); was it saved from a web page?",
}
_NO_HEADER = "a FASTA file starts with '>' and an id; here a sequence or another format comes before any header"


def is_fasta_name(path: Path) -> bool:
    """Return whether the name ends like a FASTA file's."""
    suffixes = tuple(suffix + compression for suffix in SUFFIXES for compression in COMPRESSIONS)
    return path.name.lower().endswith(suffixes)


class Origin(NamedTuple):
    """The records of a batch from ``start`` on: their file, and the number in it, from 1, of the first of them."""

    start: int
    path: Path
    number: int


@dataclass(frozen=True)
class RecordBatch:
    """Raw records and where they came from; ``origins`` is empty where they were not read from a file."""

    records: Records
    origins: list[Origin] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.records)

    def origin(self, index: int) -> tuple[Path, int] | None:
        """File of a record and its number in it, from 1; None where it was not read from FASTA."""
        # From the end: a file that fills no batch shares its start with the one after it.
        origin = next((origin for origin in reversed(self.origins) if origin.start <= index), None)
        return None if origin is None else (origin.path, origin.number + index - origin.start)

    def place(self, index: int, residue: int | None = None) -> str:
        """File, line and record of one record, or of one of its residues, for a message."""
        origin = self.origin(index)
        if origin is None:
            return f"record {self.records.headers.split()[index].decode('utf-8')!r}"
        return place_of_record(*origin, residue)


class FastaSource:
    """The files of a source, read once from first to last."""

    def __init__(self, sources: list[str], max_residues: int = MAX_RESIDUES) -> None:
        """Find the files. Raises DataError where a name is no file, folder or glob that holds FASTA.

        ``max_residues`` are those that a record may have, and a line characters.
        """
        self.paths = find_files(sources)
        self.bytes_total = sum(path.stat().st_size for path in self.paths)
        self.kernel = load_kernel()
        self._max_residues = max_residues
        self.finished: list[SourceFile] = []
        self._opened: ReadAhead | None = None
        self._damage: DataError | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes of the files, as they lie on disk, that went into what was parsed so far."""
        return sum(file.bytes for file in self.finished) + (self._opened.bytes_read if self._opened else 0)

    def batches(self) -> Iterator[RecordBatch]:
        """Batches of at least :data:`BATCH_RESIDUES` residues (the last excepted), running on from file to file.

        Raises DataError where a file can't be read, is truncated or is not FASTA; after the records before that.
        """
        parts: list[Records] = []
        origins: list[Origin] = []
        num_records = num_residues = header_bytes = 0
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
                    header_bytes += len(parts[-1].headers.text)
                    is_full = num_residues >= BATCH_RESIDUES or num_records >= BATCH_RECORDS
                    if is_full or header_bytes >= _BATCH_HEADER_BYTES:
                        yield RecordBatch(Records.joined(parts), origins)
                        parts, origins = [], [Origin(0, path, number)]
                        num_records = num_residues = header_bytes = 0
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
            with reading(path), ReadAhead(path) as text:
                self._opened = text
                yield from self._parsed(path, text)
                self.finished.append(text.source_file())
                self._opened = None
        except DataError as error:
            self._damage = error

    def _parsed(self, path: Path, text: ReadAhead) -> Iterator[Records]:
        unparsed, num_records = b"", 0
        if self.kernel is not None:
            plain = PlainFasta(self.kernel, self._max_residues)
            for plain_records in plain.records(text):
                num_records += len(plain_records)
                yield plain_records
            unparsed = plain.unparsed
        parsed = _records_by_lines(TextStream(text, unparsed), path, num_records, self._max_residues)
        problem: Exception | None = None
        while problem is None:
            records: list[tuple[bytes, bytes]] = []
            try:
                records.extend(islice(parsed, _RECORDS_AT_ONCE))
            except (DataError, OSError) as error:
                problem = error  # raised once the records before it are given out
            if not records:
                break
            yield Records.of([header for header, _ in records], [sequence for _, sequence in records])
        if problem is not None:
            raise problem


def _records_by_lines(text: io.RawIOBase, path: Path, number: int, max_residues: int) -> Iterator[tuple[bytes, bytes]]:
    """Header and sequence of each record after the first ``number``. Raises DataError at the first line that is
    refused."""
    header: str | None = None
    parts: list[str] = []
    num_residues = 0
    # '>' or a residue more, and the line's end: a longer piece is none of a line that may be.
    longest = max_residues + 2
    for raw in pieces_of_lines(io.BufferedReader(text, _LINE_BUFFER_BYTES), longest):
        line = raw.removeprefix(BYTE_ORDER_MARK) if header is None else raw
        stripped = line.strip()
        starts_record = stripped.startswith(">")
        if starts_record and header is not None:
            yield header.encode("ascii"), "".join(parts).encode("ascii")
        if problem := _problem(line, in_record=header is not None):
            raise _refusal(path, problem, in_record=header is not None)
        if starts_record:
            header, parts, num_residues = stripped[1:], [], 0
            number += 1
        elif stripped:
            parts.append(stripped)
            num_residues += len(stripped)
        # While it is read, so that a record which no protein is takes no memory.
        if num_residues > max_residues or (len(raw) == longest and not raw.endswith("\n")):
            raise DataError(
                f"{place_of_record(path, number)}: a record of more than {max_residues:,} residues, or a header of "
                "more letters; if that is right, raise data.ingest.max_residues"
            )
    if header is not None:
        yield header.encode("ascii"), "".join(parts).encode("ascii")


def _refusal(path: Path, problem: str, in_record: bool) -> DataError:
    return DataError(f"{place_of_line(path, lambda line: _problem(line, in_record) == problem)}: {problem}")


def _problem(line: str, in_record: bool) -> str | None:
    """Reason why a line is no part of a FASTA file."""
    start = line.lstrip()[:1]
    if not in_record and start not in ("", ">"):
        return _FIRST_LETTERS.get(start, _NO_HEADER)
    if not line.isascii():
        return "holds a byte outside ASCII; write it with plain letters"
    if "\0" in line:
        return "holds a NUL byte; the file is damaged or not text"
    return "starts with '#'; FASTA has no comments, remove it" if start == "#" else None


def find_files(
    sources: Sequence[str],
    is_wanted: Callable[[Path], bool] = is_fasta_name,
    kind: str = f"FASTA file ({', '.join(SUFFIXES)}, plain or compressed)",
) -> list[Path]:
    """The files that names of files, folders (searched to any depth) and globs stand for, each once, in order.

    Of a folder those whose names are wanted; ``kind`` is what messages call them. Raises DataError where a name stands
    for nothing.
    """
    files: dict[Path, Path] = {}
    for source in sources:
        with reading(Path(source)):
            for path in _expand(source, is_wanted, kind):
                files.setdefault(path.resolve(), path)
    return list(files.values())


def _expand(source: str, is_wanted: Callable[[Path], bool], kind: str) -> list[Path]:
    path = local_path(source)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and is_wanted(p) and not p.name.startswith("."))
        if not files:
            raise DataError(f"{source}: the folder holds no {kind}")
        return files
    if path.is_file():
        return [path]
    if path.exists():
        raise DataError(f"{source}: neither a file nor a folder; pipes and devices can't be read twice, save to a file")
    names = glob.glob(source, recursive=True)  # noqa: PTH207 - the pattern may be absolute
    files = sorted(path for path in map(Path, names) if path.is_file())
    if not files:
        raise DataError(f"{source}: no {'file matches' if glob.has_magic(source) else 'such file or folder'}")
    return files
