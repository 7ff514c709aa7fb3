"""Residues that a vocabulary lacks: they are counted next to a job's result, or refused."""

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from esmeray.common.errors import DataError
from esmeray.common.text import counted
from esmeray.dataset.fasta.alphabet import residues_of


class UnknownLetters(NamedTuple):
    """Letters of clean sequences that a vocabulary of residues lacks, and the token that it reads them as; empty if it
    has none."""

    letters: str = ""
    token: str = ""

    def counts_of(self, texts: Iterable[str]) -> tuple[Counter[str], int]:
        """Count each unknown letter, and all residues."""
        counts: Counter[str] = Counter()
        total = 0
        if self.letters:  # most vocabularies lack none: the texts are not even read
            for text in texts:
                total += residues_of(text)
                counts.update({letter: text.count(letter) for letter in self.letters})
        return +counts, total

    def report(self, texts: Iterable[str]) -> str | None:
        """Return the line on the unknown residues of all texts. Returns and raises as :meth:`line`."""
        return self.line(*self.counts_of(texts))

    def line(self, counts: Counter[str], total: int) -> str | None:
        """Return the line on a job's unknown residues, None if there are none; ``counts``: by letter.

        Raises DataError if there is no unknown token, or if more than half of all residues are unknown.
        """
        unknown = counts.total()
        if not unknown:
            return None
        what = f"{counted(unknown, 'residue{s}')} unknown to the vocabulary ({', '.join(sorted(counts))})"
        if not self.token:
            raise DataError(f"{what}, which has no unknown token; remove these sequences, or choose another model")
        if 2 * unknown > total:
            raise DataError(
                f"{what}, more than half of {total:,}: the results would say nothing; choose another model, or give "
                "sequences that it knows"
            )
        return f"{what}, read as {self.token}"

    def warn(self, texts: Iterable[str]) -> None:
        """Warn of the unknown residues in Python, at the call of the caller. Raises as :meth:`line`."""
        line = self.report(texts)
        if line is not None:
            warnings.warn(line, stacklevel=3)


ALL_KNOWN = UnknownLetters()
