"""Residues that a vocabulary lacks: count them with a job's result, or refuse them."""

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from esmeray.common.errors import DataError
from esmeray.common.text import counted
from esmeray.dataset.fasta.alphabet import residues_of


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
