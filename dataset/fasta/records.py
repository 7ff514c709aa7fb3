"""Raw records in columns: what a FASTA reader gives, and what conversion takes.

In columns, because a list of Python objects costs about 40 ns for each to make and 40 more for whatever is done with
it, of which conversion has several; a record of 350 residues otherwise takes 300 ns in all.

Shape legend: N records.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray


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
        ids = list(map(_first_word, headers))
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
        if len(parts) == 1:
            return parts[0]
        return cls(
            headers=_joined_lines([records.headers for records in parts]),
            ids=_joined_lines([records.ids for records in parts]),
            residues=b"".join(records.residues for records in parts),
            lengths=np.concatenate([records.lengths for records in parts]),
            id_hashes=np.concatenate([records.id_hashes for records in parts]),
            hashes=np.concatenate([records.hashes for records in parts]),
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
    """What lies end to end in a text, by its lengths."""
    ends = accumulate(lengths.tolist(), initial=0)
    return [text[start:end] for start, end in pairwise(ends)]


def lengths_of(texts: list[bytes]) -> np.ndarray:
    """(N,) uint32: bytes of each."""
    return np.fromiter(map(len, texts), dtype=np.uint32, count=len(texts))


def hashes_of(texts: list[bytes]) -> np.ndarray:
    """(N,) uint64: XXH3-64 of each."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, texts), dtype=np.uint64, count=len(texts))


def keys_of(sequences: Iterable[Any]) -> NDArray[np.uint64]:
    """(N, 2) uint64: the identity of each sequence, of bytes, where rows of it are kept for others to find.

    Its XXH3-64, as stores have it, and that by another seed: of two sequences that agree in 64 bits, which anybody can
    make, one would get the other's rows.
    """
    halves = [(xxhash.xxh3_64_intdigest(text), xxhash.xxh3_64_intdigest(text, 1)) for text in sequences]
    return np.array(halves, dtype=np.uint64).reshape(-1, 2)


def _first_word(header: bytes) -> bytes:
    # As a string, because bytes take fewer of ASCII's characters for white space.
    return (header.decode("ascii").split(None, 1) or [""])[0].encode("ascii")


def _span(lengths: np.ndarray, start: int, end: int) -> tuple[int, int]:
    first = int(lengths[:start].sum(dtype=np.int64))
    return first, first + int(lengths[start:end].sum(dtype=np.int64))


def _joined_lines(parts: list[Lines]) -> Lines:
    return Lines(b"".join(lines.text for lines in parts), np.concatenate([lines.lengths for lines in parts]))
