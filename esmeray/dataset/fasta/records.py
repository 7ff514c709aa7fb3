"""Raw records in columns, which a FASTA reader gives and conversion takes, and the compiled code that fills and checks
them.

In columns, because a list of Python objects costs about 40 ns for each to make and 40 more for whatever is done with
it, of which conversion has several; a record of 350 residues otherwise takes 300 ns in all.

``kernel.cpp`` is compiled once a machine (:mod:`esmeray.common.compiled_code`), in about a second: plain FASTA to
records, and a set of hashes that notices repeated ids. Without a compiler :mod:`esmeray.dataset.fasta.reader` parses by
lines and Python's set holds the ids: a loop over lines in Python takes 5 us for a record of 350 residues in lines of
60, the kernel 0.17 us, hashes included (a shared core of an AMD EPYC 9004).

Shape legend: N records or hashes, B buckets, S slots of a bucket.
"""

import ctypes
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from xxhash import _xxhash  # type: ignore[attr-defined]

from esmeray.common import compiled_code
from esmeray.dataset.fasta.alphabet import FIRST, LAST, LEFT_OUT

_HEADER_BYTES = 1 << 20
"""More than headers have; a record's text is plain up to this and twice the residues that a record may have."""

_LINE_FEED, _HEADER = b"\n>"

_SLOTS = 8
"""Hashes of a bucket: one cache line, so that looking for a hash touches memory once."""
_BUCKETS_AT_ONCE = 1 << 13


@dataclass(frozen=True)
class Lines:
    """N texts, a line feed behind each, and their (N,) uint32 lengths without it."""

    text: bytes
    lengths: np.ndarray

    @classmethod
    def of(cls, texts: list[bytes]) -> "Lines":
        """From texts without line feeds."""
        return cls(b"\n".join([*texts, b""]), lengths_of(texts))

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self) -> list[bytes]:
        return self.text.split(b"\n")[:-1]

    def joined(self) -> bytes:
        return self.text.replace(b"\n", b"")

    def part(self, start: int, end: int) -> "Lines":
        """Records from ``start`` up to ``end``."""
        first, behind = _span(self.lengths, start, end)
        # Lengths are without line feeds, and there is one behind each text.
        return Lines(self.text[first + start : behind + end], self.lengths[start:end])


@dataclass(frozen=True)
class Records:
    """N records as they stand in a file, in ASCII.

    Attributes:
        headers: header lines without '>' and without blanks at their ends.
        ids: the first word of each header, empty where there is none.
        residues: the sequences end to end.
        lengths: (N,) uint32, characters of each sequence.
        id_hashes, hashes: (N,) uint64, XXH3-64 of each id and sequence.
        all_stored: all residues are known to be letters of the store's alphabet; False when nobody looked.
    """

    headers: Lines
    ids: Lines
    residues: bytes
    lengths: np.ndarray
    id_hashes: np.ndarray
    hashes: np.ndarray
    all_stored: bool = False

    @classmethod
    def of(cls, headers: list[bytes], sequences: list[bytes]) -> "Records":
        """From header lines and sequences, with their ids and hashes."""
        # As strings, because bytes take fewer of ASCII's characters for white space.
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
        # The usual case: a chunk of a file is about a batch, and need not be copied.
        if len(parts) == 1:
            return parts[0]
        return cls(
            headers=_joined_lines([records.headers for records in parts]),
            ids=_joined_lines([records.ids for records in parts]),
            residues=b"".join(records.residues for records in parts),
            lengths=np.concatenate([records.lengths for records in parts]),
            id_hashes=np.concatenate([records.id_hashes for records in parts]),
            hashes=np.concatenate([records.hashes for records in parts]),
            # Of a part that nobody looked at it is not known.
            all_stored=all(records.all_stored for records in parts),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sequences(self) -> list[bytes]:
        return pieces(self.residues, self.lengths)

    @property
    def longest(self) -> int:
        """Residues of the longest sequence, or letters of the longest header, whichever is more."""
        return max(int(self.lengths.max(initial=0)), int(self.headers.lengths.max(initial=0)))

    def part(self, start: int, end: int) -> "Records":
        """The records from ``start`` to before ``end``."""
        # Most chunks are taken whole, and need no copy.
        if start == 0 and end == len(self):
            return self
        first, behind = _span(self.lengths, start, end)
        return Records(
            headers=self.headers.part(start, end),
            ids=self.ids.part(start, end),
            residues=self.residues[first:behind],
            lengths=self.lengths[start:end],
            id_hashes=self.id_hashes[start:end],
            hashes=self.hashes[start:end],
            all_stored=self.all_stored,
        )


def pieces(text: bytes, lengths: np.ndarray) -> list[bytes]:
    """Split a text whose pieces lie end to end, by their lengths."""
    return [text[start:end] for start, end in pairwise(accumulate(lengths.tolist(), initial=0))]


def stretches(lengths_N: NDArray[np.integer], budget: int, most: int | None = None) -> Iterator[tuple[int, int]]:
    """First and end of one stretch of texts after the other: of as many as the budget holds, and no more than ``most``.

    What is longer than the budget is alone.
    """
    # A view: each stretch is one binary search; NumPy's own costs more, and a list takes five times the memory.
    ends = np.cumsum(lengths_N, dtype=np.int64).data
    first = used = 0
    while first < len(ends):
        # At least one: what is too long for a batch is still to be computed, and may fit into memory.
        last = min(max(bisect_right(ends, used + budget), first + 1), first + (most or len(ends)))
        yield first, last
        first, used = last, ends[last - 1]


def lengths_of(texts: Sequence[Any]) -> np.ndarray:
    """(N,) uint32: bytes of each."""
    return np.fromiter(map(len, texts), dtype=np.uint32, count=len(texts))


def hashes_of(texts: list[bytes], seed: int = 0) -> np.ndarray:
    """(N,) uint64: XXH3-64 of each."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, texts, repeat(seed)), dtype=np.uint64, count=len(texts))


def keys_of(sequences: Iterable[Any]) -> NDArray[np.uint64]:
    """(N, 2) uint64: the identity of each sequence, of bytes, where rows of it are kept for others to find.

    Its XXH3-64, as stores have it, and that by another seed: of two sequences that agree in 64 bits, which anybody can
    make, one would get the other's rows.
    """
    halves = ((xxhash.xxh3_64_intdigest(text), xxhash.xxh3_64_intdigest(text, 1)) for text in sequences)
    return np.fromiter(halves, np.dtype((np.uint64, 2)))


def _span(lengths: np.ndarray, start: int, end: int) -> tuple[int, int]:
    first = int(lengths[:start].sum(dtype=np.int64))
    return first, first + int(lengths[start:end].sum(dtype=np.int64))


def _joined_lines(parts: list[Lines]) -> Lines:
    return Lines(b"".join(lines.text for lines in parts), np.concatenate([lines.lengths for lines in parts]))


class _Columns:
    """Room for what the kernel writes: all that a text of some size can give."""

    def __init__(self, num_bytes: int) -> None:
        most_records = num_bytes // 2 + 1  # the shortest is '>' and a line feed
        self.headers, self.ids, self.residues = (np.empty(num_bytes + 1, dtype=np.uint8) for _ in range(3))
        self.header_lengths, self.id_lengths, self.lengths = (np.empty(most_records, np.uint32) for _ in range(3))
        self.id_hashes, self.hashes = (np.empty(most_records, np.uint64) for _ in range(2))
        self.totals = np.empty(4, dtype=np.int64)
        arrays = (self.headers, self.ids, self.residues, self.header_lengths, self.id_lengths, self.lengths)
        self.addresses = [array.ctypes for array in (*arrays, self.id_hashes, self.hashes, self.totals)]

    def records(self, count: int) -> Records:
        # Copies, since the next text is written into the same arrays.
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


class Kernel:
    """The functions of ``kernel.cpp``; they let go of Python's global lock.

    XXH3-64 is called where the xxhash package has it, so that there is one implementation of what stores hold.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        # ctypes takes a number for a C int unless declared: addresses would lose half their bits.
        self._hash = ctypes.cast(ctypes.CDLL(_xxhash.__file__).XXH3_64bits, ctypes.c_void_p)
        library.parse_plain_fasta.restype = ctypes.c_int64

    def parse(self, text: np.ndarray, columns: _Columns) -> Records | None:
        """The records of a text that starts with '>' and ends with a line feed; None where it is not plain."""
        count = self._library.parse_plain_fasta(text.ctypes, ctypes.c_int64(len(text)), self._hash, *columns.addresses)
        return None if count < 0 else columns.records(count)

    def insert(self, table_BS: np.ndarray, odd: int, hashes_N: np.ndarray) -> np.ndarray:
        """Put (N,) uint64 other than 0 into the table of a ``HashSet64``; (N,) bool: which are new.

        ``odd`` spreads them over the buckets.
        """
        hashes_N = np.ascontiguousarray(hashes_N)  # the kernel walks over memory, not over a view's strides
        fresh_N = np.empty(len(hashes_N), dtype=bool)
        bits, count = map(ctypes.c_int64, (len(table_BS).bit_length() - 1, len(hashes_N)))
        self._library.insert_hashes(table_BS.ctypes, bits, ctypes.c_uint64(odd), hashes_N.ctypes, count, fresh_N.ctypes)
        return fresh_N


def load_kernel() -> Kernel | None:
    """The kernel, compiled if it was not yet; None where that can't be done."""
    library = compiled_code.load(Path(__file__).with_name("kernel.cpp"), FIRST=FIRST, LAST=LAST, LEFT_OUT=LEFT_OUT)
    try:
        return None if library is None else Kernel(library)
    except (AttributeError, OSError):  # a build of xxhash that does not export its function
        return None


class PlainFasta:
    """Parser of FASTA that is laid out plainly, as nearly all is.

    Plain is ASCII without control characters but for ends of lines (line feeds, or with a carriage return before),
    without blank lines and comments, without blanks in sequences. From the first text that is not, or holds a record of
    more than ``max_residues``, nothing more is given.
    """

    def __init__(self, kernel: Kernel, max_residues: int) -> None:
        self._kernel = kernel
        self._max_residues = max_residues
        self._size = 0
        self._buffer = bytearray()
        self._allocate(1 << 20)

    def records(self, chunks: Iterable[memoryview]) -> Iterator[Records]:
        """Records of the text, as they are complete, up to its end or to what is not plain."""
        for chunk in chunks:
            searched = max(self._size - 1, 0)  # the line feed may be the last byte of the chunk before
            self._append(chunk)
            last_header = self._buffer.rfind(b"\n>", searched, self._size) + 1
            # A long record may need many chunks; a text of another kind, without headers, must not fill memory.
            if not last_header and self._size < 2 * self._max_residues + _HEADER_BYTES and self._text[0] == _HEADER:
                continue
            records = self._take(last_header)
            if records is None:
                return
            yield records
        size = self._size
        # Many files lack the last line feed, which the kernel relies on.
        if size and self._text[size - 1] != _LINE_FEED:
            self._append(memoryview(b"\n"))
        records = self._take(self._size)
        if records is None:
            self._size = size  # without the line feed, which the file does not have
        else:
            yield records

    @property
    def unparsed(self) -> bytes:
        """The text that was taken and not given out as records."""
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
            self._allocate(2 * end)  # doubled, so that a record of any length is copied few times
        self._buffer[self._size : end] = chunk
        self._size = end

    def _take(self, end: int) -> Records | None:
        """The complete records before ``end``; the text after it moves to the front. None, unmoved, if not plain."""
        records = self._kernel.parse(self._text[:end], self._columns) if end and self._text[0] == _HEADER else None
        # The parser by lines refuses what is too long, with its line, once it gave out the records before it.
        if records is None or records.longest > self._max_residues:
            return None
        rest = self._size - end
        self._buffer[:rest] = self._buffer[end : self._size]
        self._size = rest
        return records


class HashSet64:
    """Set of uint64 that only grows and takes thousands at a time.

    With the kernel a table of buckets of one cache line: 16 to 32 bytes a hash (4 MiB at first). Without it Python's
    set, which takes about 70.
    """

    def __init__(self, kernel: Kernel | None = None) -> None:
        self._kernel = kernel
        # Of this set alone: ids whose hashes fall into one bucket of every set would cost the square of their number.
        self._odd = secrets.randbits(64) | 1
        self._values: set[int] = set()  # instead of the table where there is no kernel
        self._table_BS = np.zeros((1 << 16, _SLOTS) if kernel else (0, _SLOTS), dtype=np.uint64)
        self._count = 0

    def add(self, hashes_N: np.ndarray) -> np.ndarray:
        """Insert all; (N,) bool: True where the hash was neither in the set nor earlier among ``hashes_N``."""
        values_N = np.maximum(hashes_N, np.uint64(1))  # 0 marks an empty slot, so the hash 0 is kept as 1
        if self._kernel is None:
            return self._add_to_set(values_N)
        # At most half full, also when all are new: a free slot is then near whatever the hash.
        while 2 * (self._count + len(values_N)) > self._table_BS.size:
            self._grow(self._kernel)
        fresh_N = self._kernel.insert(self._table_BS, self._odd, values_N)
        self._count += int(np.count_nonzero(fresh_N))
        return fresh_N

    def _add_to_set(self, values_N: np.ndarray) -> np.ndarray:
        fresh_N = np.zeros(len(values_N), dtype=bool)
        for index, value in enumerate(values_N.tolist()):
            fresh_N[index] = value not in self._values
            self._values.add(value)
        return fresh_N

    def _grow(self, kernel: Kernel) -> None:
        old_BS = self._table_BS
        # Not zeros(), whose memory is had in pages of 4 KiB; what NumPy allocates for empty() may be had in huge ones.
        self._table_BS = np.empty((2 * len(old_BS), _SLOTS), dtype=np.uint64)
        self._table_BS.fill(0)
        # In parts: choosing the slots that hold something copies them, beside both tables.
        for start in range(0, len(old_BS), _BUCKETS_AT_ONCE):
            part_BS = old_BS[start : start + _BUCKETS_AT_ONCE]
            kernel.insert(self._table_BS, self._odd, part_BS[part_BS != 0])
