"""Letters that a store can hold, the repair of sequences with other letters, and letters that a vocabulary lacks.

The 20 amino acids, the ambiguity codes B and Z, selenocysteine U, pyrrolysine O and the unknown X are kept. Other
letters are repaired:

- J (leucine or isoleucine) becomes X, because ESM-2's alphabet lacks it.
- Lower case becomes upper case.
- One '*' at the end (a translated stop codon) is removed.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.common.text import counted

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
STORE_ALPHABET = AMINO_ACIDS + "BUZOX"
STORE_BYTES = STORE_ALPHABET.encode("ascii")
GAPS = "-."
MASK_TEXT = "<mask>"
"""Text form of a masked residue."""

FIRST, LAST = min(STORE_BYTES), max(STORE_BYTES)
(LEFT_OUT,) = set(range(FIRST, LAST)) - set(STORE_BYTES)
"""J, the only letter between the first and the last of the alphabet that is not stored."""

_NOT_STORED = bytes(set(range(256)) - set(STORE_BYTES))
_TO_X = bytes.maketrans(_NOT_STORED, b"X" * len(_NOT_STORED))


class CleanSequence(NamedTuple):
    """A sequence after the unconditional repairs, and the number of its characters outside the alphabet."""

    residues: bytes
    upper_cased: bool
    stop_dropped: bool
    j_to_x: int
    num_bad: int


def clean(sequence: bytes) -> CleanSequence:
    """Apply the unconditional repairs, and count them."""
    # The order matters: a stop after lower-case letters is still a stop, and J is counted in either case.
    upper = sequence.upper()
    stop_dropped = upper.endswith(b"*")
    residues = upper[:-1] if stop_dropped else upper
    j_to_x = residues.count(b"J")
    residues = residues.replace(b"J", b"X")
    num_bad = len(residues.translate(None, STORE_BYTES))
    return CleanSequence(residues, upper != sequence, stop_dropped, j_to_x, num_bad)


def residues_of(text: str) -> int:
    """Return the number of residues in a text. A mask counts as one residue."""
    return len(text) - text.count(MASK_TEXT) * (len(MASK_TEXT) - 1)


def bad_to_x(residues: bytes) -> bytes:
    return residues.translate(_TO_X)


def kmers(residues: NDArray[np.uint8], groups: Sequence[str], k: int) -> NDArray[np.int64]:
    """Return the k-mers of an ASCII sequence as numbers with base ``len(groups)``.

    A letter's digit is the index of its group. K-mers with a letter outside the groups are left out.
    """
    # This code is so negative that no other letters bring a k-mer back above zero: one test at the end finds them all.
    codes = np.full(256, -(len(groups) ** k), np.int64)
    for digit, group in enumerate(groups):
        codes[np.frombuffer(group.encode(), np.uint8)] = digit
    coded = codes[residues]
    count = max(0, len(residues) - k + 1)
    numbers = np.zeros(count, np.int64)
    for offset in range(k):
        numbers = numbers * len(groups) + coded[offset : offset + count]
    return numbers[numbers >= 0]


class UnknownLetters(NamedTuple):
    """Letters of clean sequences that a vocabulary of residues lacks, and the unknown token that replaces them.

    The token is empty if the vocabulary has none.
    """

    letters: str = ""
    token: str = ""

    def counts_of(self, texts: Iterable[str]) -> tuple[Counter[str], int]:
        """Count each unknown letter, and all residues (0 if the vocabulary lacks no letter)."""
        counts: Counter[str] = Counter()
        total = 0
        if self.letters:  # most vocabularies lack none, so the texts need not be read
            for text in texts:
                total += residues_of(text)
                counts.update({letter: text.count(letter) for letter in self.letters})
        return +counts, total

    def report(self, texts: Iterable[str]) -> str | None:
        """Return the report on unknown residues in all texts. Returns and raises as :meth:`line`."""
        return self.line(*self.counts_of(texts))

    def line(self, counts: Counter[str], total: int) -> str | None:
        """Return the report on a job's unknown residues, or None if there are none; ``counts`` are per letter.

        Raises DataError if there is no unknown token, or if more than half of all residues are unknown.
        """
        unknown = counts.total()
        if not unknown:
            return None
        finding = f"{counted(unknown, 'residue{s}')} unknown to the vocabulary ({', '.join(sorted(counts))})"
        if not self.token:
            raise DataError(f"{finding}, which has no unknown token; remove these sequences, or choose another model")
        if 2 * unknown > total:
            raise DataError(
                f"{finding}, more than half of {total:,}, so results would be meaningless; choose another model, "
                "or sequences of its alphabet"
            )
        return f"{finding}, read as {self.token}"

    def warn(self, texts: Iterable[str]) -> None:
        """Issue a Python warning about unknown residues, located at the caller's call. Raises as :meth:`line`."""
        line = self.report(texts)
        if line is not None:
            warnings.warn(line, stacklevel=3)


ALL_KNOWN = UnknownLetters()
