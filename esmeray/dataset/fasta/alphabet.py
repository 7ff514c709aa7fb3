"""The letters that a store may hold, and what is done to the letters of a sequence that are others.

The 20 amino acids, the ambiguity codes B and Z, selenocysteine U, pyrrolysine O and the unknown X are kept. J (leucine
or isoleucine) becomes X, since ESM-2's alphabet lacks it; lower case becomes upper case; one '*' at the end (a
translated stop codon) goes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
STORE_ALPHABET = AMINO_ACIDS + "BUZOX"
STORE_BYTES = STORE_ALPHABET.encode("ascii")
GAPS = "-."
MASK_TEXT = "<mask>"
"""A masked residue in a text."""

FIRST, LAST = min(STORE_BYTES), max(STORE_BYTES)
(LEFT_OUT,) = set(range(FIRST, LAST)) - set(STORE_BYTES)
"""J: the letters are all others from A to Z."""

_NOT_STORED = bytes(set(range(256)) - set(STORE_BYTES))
_TO_X = bytes.maketrans(_NOT_STORED, b"X" * len(_NOT_STORED))


class CleanSequence(NamedTuple):
    """A sequence after the repairs that are always made, and the characters that are still outside the alphabet."""

    residues: bytes
    upper_cased: bool
    stop_dropped: bool
    j_to_x: int
    num_bad: int


def clean(sequence: bytes) -> CleanSequence:
    """Make the repairs that are always made, and count them."""
    # In this order: a stop after lower-case letters is still a stop, and J is counted whatever its case.
    upper = sequence.upper()
    stop_dropped = upper.endswith(b"*")
    residues = upper[:-1] if stop_dropped else upper
    j_to_x = residues.count(b"J")
    residues = residues.replace(b"J", b"X")
    num_bad = len(residues.translate(None, STORE_BYTES))
    return CleanSequence(residues, upper != sequence, stop_dropped, j_to_x, num_bad)


def residues_of(text: str) -> int:
    """Residues of a text, a masked one being one."""
    return len(text) - text.count(MASK_TEXT) * (len(MASK_TEXT) - 1)


def bad_to_x(residues: bytes) -> bytes:
    return residues.translate(_TO_X)


def kmers(residues: NDArray[np.uint8], groups: Sequence[str], k: int) -> NDArray[np.int64]:
    """Number of each k-mer of a sequence in ASCII whose letters are all of a group; groups are the digits."""
    # So far below zero that no letters beside it bring a k-mer back above: one test at the end then finds them all.
    codes = np.full(256, -(len(groups) ** k), np.int64)
    for digit, group in enumerate(groups):
        codes[np.frombuffer(group.encode(), np.uint8)] = digit
    coded = codes[residues]
    count = max(0, len(residues) - k + 1)
    numbers = np.zeros(count, np.int64)
    for offset in range(k):
        numbers = numbers * len(groups) + coded[offset : offset + count]
    return numbers[numbers >= 0]
