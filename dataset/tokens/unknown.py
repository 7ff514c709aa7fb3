"""Residues that a vocabulary lacks: they are counted next to a job's result, or refused."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from esmeray.common.errors import DataError
from esmeray.common.text import counted
from esmeray.dataset.fasta.alphabet import residues_of


class UnknownLetters(NamedTuple):
    """Letters that a vocabulary lacks, and the token that it reads them as; empty if it has no unknown token."""

    letters: str = ""
    token: str = ""

    def report(self, texts: Iterable[str]) -> str | None:
        """Return the line on the unknown residues of all texts, None if there are none. Raises as :meth:`line`."""
        if not self.letters:  # most vocabularies: the texts are not even read
            return None
        counts: Counter[str] = Counter()
        total = 0
        for text in texts:
            total += residues_of(text)
            counts.update({letter: text.count(letter) for letter in self.letters})
        return self._replace(letters="".join(sorted(+counts))).line(counts.total(), total)

    def line(self, unknown: int, total: int, unit: str = "residue") -> str | None:
        """Return the line on the unknown tokens of a job, None if there are none.

        Raises DataError if there is no unknown token, or if more than half of all tokens are unknown.
        """
        if not unknown:
            return None
        which = f" ({', '.join(self.letters)})" if self.letters else ""
        what = f"{counted(unknown, unit + '{s}')} unknown to the vocabulary{which}"
        if not self.token:
            raise DataError(f"{what}, which has no unknown token; remove these sequences, or choose another model")
        if 2 * unknown > total:
            raise DataError(
                f"{what}, more than half of {total:,}: the results would say nothing; choose another model, or give "
                "sequences that it knows"
            )
        return f"{what}, read as {self.token}"
