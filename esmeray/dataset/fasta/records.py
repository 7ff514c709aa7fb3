"""Raw FASTA records in columns, and the compiled code that parses them.

Columns avoid one Python object per record. Creating an object takes about 40 ns and each operation on it 40 ns more;
conversion has several operations per record, and takes 300 ns in all for a record of 350 residues.

``kernel.cpp`` is compiled once per machine (:mod:`esmeray.common.compiled_code`), in about a second. It parses plain
FASTA. Without a compiler, :mod:`esmeray.dataset.fasta.reader` parses by lines. For a record of 350 residues in lines of
60, the Python loop takes 5 us and the kernel 0.17 us, hashes included (a shared core of an AMD EPYC 9004).

Shape legend: N records.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from xxhash import _xxhash  # type: ignore[attr-defined]

from esmeray.common import compiled_code
from esmeray.dataset.fasta.alphabet import FIRST, LAST, LEFT_OUT

_HEADER_BYTES = 1 << 20
"""Allowance for header bytes. Text is buffered up to this plus twice the maximum number of residues of a record."""

_LINE_FEED, _HEADER = b"\n>"


@dataclass(frozen=True)
class Lines:
    """N texts, each followed by a line feed, and their (N,) uint32 lengths without it."""

    text: bytes
    lengths: np.ndarray

    @classmethod
    def of(cls, texts: list[bytes]) -> "Lines":
        """Build from texts without line feeds."""
        return cls(b"\n".join([*texts, b""]), lengths_of(texts))

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self) -> list[bytes]:
        return self.text.split(b"\n")[:-1]

    def joined(self) -> bytes:
        return self.text.replace(b"\n", b"")


@dataclass(frozen=True)
class Records:
    """N records as they are in a file, in ASCII.

    Attributes:
        headers: header lines without '>' and without leading and trailing blanks.
        ids: the first word of each header; empty if there is none.
        residues: the sequences, concatenated.
        lengths: (N,) uint32, characters of each sequence.
        id_hashes, hashes: (N,) uint64, XXH3-64 of each id and sequence.
        all_stored: True if all residues are known to be letters of the store's alphabet; False if not checked.
    """

    headers: Lines
    ids: Lines
    residues: bytes
    lengths: np.ndarray
    id_hashes: np.ndarray
    hashes: np.ndarray
    all_stored: bool = False

    @classmethod
    def of(cls, pairs: list[tuple[bytes, bytes]]) -> "Records":
        """Build from pairs of a header line and a sequence; split off the ids and compute the hashes."""
        headers = [header for header, _ in pairs]
        sequences = [sequence for _, sequence in pairs]
        # Split as strings: str.split knows more ASCII white space than bytes.split.
        words = [header.decode("ascii").split(None, 1) for header in headers]
        ids = [word[0].encode("ascii") if word else b"" for word in words]
        return cls(
            headers=Lines.of(headers),
            ids=Lines.of(ids),
            residues=b"".join(sequences),
            lengths=lengths_of(sequences),
            id_hashes=hashes_of(ids),
            hashes=hashes_of(sequences),
        )

    @classmethod
    def joined(cls, parts: list["Records"]) -> "Records":
        # The usual case: a chunk of a file is about one batch and needs no copy.
        if len(parts) == 1:
            return parts[0]
        return cls(
            headers=_joined_lines([records.headers for records in parts]),
            ids=_joined_lines([records.ids for records in parts]),
            residues=b"".join(records.residues for records in parts),
            lengths=np.concatenate([records.lengths for records in parts]),
            id_hashes=np.concatenate([records.id_hashes for records in parts]),
            hashes=np.concatenate([records.hashes for records in parts]),
            # A part that was not checked makes the whole unchecked.
            all_stored=all(records.all_stored for records in parts),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sequences(self) -> list[bytes]:
        return pieces(self.residues, self.lengths)

    @property
    def text_bytes(self) -> int:
        """Bytes of all headers and sequences."""
        return len(self.headers.text) + len(self.residues)

    @property
    def longest(self) -> int:
        """Length of the longest sequence (residues) or of the longest header (characters), whichever is more."""
        return max(int(self.lengths.max(initial=0)), int(self.headers.lengths.max(initial=0)))


def pieces(text: bytes, lengths: np.ndarray) -> list[bytes]:
    """Split concatenated texts by their lengths."""
    return [text[start:end] for start, end in pairwise(accumulate(lengths.tolist(), initial=0))]


def stretches(lengths_N: NDArray[np.integer], budget: int, most: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield the first and end index of consecutive groups of texts.

    Each group holds as many texts as fit into the budget, and at most ``most``. A text longer than the budget is a
    group of its own.
    """
    # A memoryview: bisect on it is one binary search per group. np.searchsorted has more overhead, a list takes five
    # times the memory.
    ends = np.cumsum(lengths_N, dtype=np.int64).data
    first = used = 0
    while first < len(ends):
        # At least one text: one that exceeds the budget must still be computed, and may fit into memory.
        last = min(max(bisect_right(ends, used + budget), first + 1), first + (most or len(ends)))
        yield first, last
        first, used = last, ends[last - 1]


def lengths_of(texts: Sequence[Any]) -> np.ndarray:
    """Return the length of each text, (N,) uint32; bytes if the texts are bytes."""
    return np.fromiter(map(len, texts), dtype=np.uint32, count=len(texts))


def hashes_of(texts: list[bytes], seed: int = 0) -> np.ndarray:
    """Return the XXH3-64 of each text, (N,) uint64."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, texts, repeat(seed)), dtype=np.uint64, count=len(texts))


def keys_of(sequences: Iterable[Any]) -> NDArray[np.uint64]:
    """Return a 128-bit key per sequence (of bytes), (N, 2) uint64, for caches of results.

    The first column is the XXH3-64 that stores have, the second the XXH3-64 with another seed. With 64 bits alone,
    anyone could construct two sequences with one key, and one would get the other's results.
    """
    halves = ((xxhash.xxh3_64_intdigest(text), xxhash.xxh3_64_intdigest(text, 1)) for text in sequences)
    return np.fromiter(halves, np.dtype((np.uint64, 2)))


def _joined_lines(parts: list[Lines]) -> Lines:
    return Lines(b"".join(lines.text for lines in parts), np.concatenate([lines.lengths for lines in parts]))


class _Columns:
    """Output arrays of the kernel, large enough for any text of a given size."""

    def __init__(self, num_bytes: int) -> None:
        most_records = num_bytes // 2 + 1  # the shortest record is '>' and a line feed
        self.headers, self.ids, self.residues = (np.empty(num_bytes + 1, dtype=np.uint8) for _ in range(3))
        self.header_lengths, self.id_lengths, self.lengths = (np.empty(most_records, np.uint32) for _ in range(3))
        self.id_hashes, self.hashes = (np.empty(most_records, np.uint64) for _ in range(2))
        self.totals = np.empty(4, dtype=np.int64)
        arrays = (self.headers, self.ids, self.residues, self.header_lengths, self.id_lengths, self.lengths)
        self.addresses = [array.ctypes for array in (*arrays, self.id_hashes, self.hashes, self.totals)]

    def records(self, count: int) -> Records:
        # Copies, because the next text overwrites the arrays.
        header_bytes, id_bytes, num_residues, all_stored = self.totals.tolist()
        return Records(
            headers=Lines(self.headers[:header_bytes].tobytes(), self.header_lengths[:count].copy()),
            ids=Lines(self.ids[:id_bytes].tobytes(), self.id_lengths[:count].copy()),
            residues=self.residues[:num_residues].tobytes(),
            lengths=self.lengths[:count].copy(),
            id_hashes=self.id_hashes[:count].copy(),
            hashes=self.hashes[:count].copy(),
            all_stored=bool(all_stored),
        )


class Kernel(NamedTuple):
    """The parser of ``kernel.cpp``, which releases the GIL, and the address of XXH3-64.

    XXH3-64 is the xxhash package's own function, so that only one implementation computes the hashes in stores.
    """

    library: ctypes.CDLL
    xxh3_64: ctypes.c_void_p


def load_kernel() -> Kernel | None:
    """Load the kernel, and compile it if necessary. Return None if it can't be compiled or loaded."""
    try:
        xxh3_64 = ctypes.cast(ctypes.CDLL(_xxhash.__file__).XXH3_64bits, ctypes.c_void_p)
    except (AttributeError, OSError):  # xxhash was built without exporting its function
        return None
    library = compiled_code.load(Path(__file__).with_name("kernel.cpp"), FIRST=FIRST, LAST=LAST, LEFT_OUT=LEFT_OUT)
    if library is None:
        return None
    library.parse_plain_fasta.restype = ctypes.c_int64  # ctypes would return a C int
    return Kernel(library, xxh3_64)


class PlainFasta:
    """Parser of FASTA with a plain layout, which nearly all files have.

    Plain FASTA is ASCII without control characters except line ends (\\n or \\r\\n). It has no blank lines, no
    comments, and no blanks in sequences. Parsing stops at the first text that is not plain or that holds a record of
    more than ``max_residues``.
    """

    def __init__(self, kernel: Kernel, max_residues: int) -> None:
        self._kernel = kernel
        self._max_residues = max_residues
        self._size = 0
        self._buffer = bytearray()
        self._allocate(1 << 20)

    def records(self, chunks: Iterable[memoryview]) -> Iterator[Records]:
        """Yield complete records until the end of the text or the first part that is not plain."""
        for chunk in chunks:
            searched = max(self._size - 1, 0)  # the line feed may be the last byte of the previous chunk
            self._append(chunk)
            last_header = self._buffer.rfind(b"\n>", searched, self._size) + 1
            # A long record may span many chunks. The limit keeps text without headers, not FASTA, from filling memory.
            if not last_header and self._size < 2 * self._max_residues + _HEADER_BYTES and self._text[0] == _HEADER:
                continue
            records = self._take(last_header)
            if records is None:
                return
            yield records
        size = self._size
        # Many files lack the last line feed, which the kernel needs.
        if size and self._text[size - 1] != _LINE_FEED:
            self._append(memoryview(b"\n"))
        records = self._take(self._size)
        if records is None:
            self._size = size  # drop the added line feed, which is not in the file
        else:
            yield records

    @property
    def unparsed(self) -> bytes:
        """Text that was read but not yielded as records."""
        return bytes(self._buffer[: self._size])

    def _allocate(self, num_bytes: int) -> None:
        buffer = bytearray(num_bytes)
        buffer[: self._size] = self._buffer[: self._size]
        self._buffer = buffer
        self._text = np.frombuffer(buffer, dtype=np.uint8)
        self._columns = _Columns(num_bytes)

    def _append(self, chunk: memoryview) -> None:
        end = self._size + len(chunk)
        if end > len(self._buffer):
            self._allocate(2 * end)  # doubled, so that a record of any length is copied only a few times
        self._buffer[self._size : end] = chunk
        self._size = end

    def _take(self, end: int) -> Records | None:
        """Return the complete records before ``end`` and move the rest to the front; None, unmoved, if not plain."""
        if not end or self._text[0] != _HEADER:
            return None
        parse, columns = self._kernel.library.parse_plain_fasta, self._columns
        count = parse(self._text.ctypes, ctypes.c_int64(end), self._kernel.xxh3_64, *columns.addresses)
        if count < 0:
            return None
        records = columns.records(count)
        # The parser by lines reports a record that is too long, with its location, after the records before it.
        if records.longest > self._max_residues:
            return None
        rest = self._size - end
        self._buffer[:rest] = self._buffer[end : self._size]
        self._size = rest
        return records
