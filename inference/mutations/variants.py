"""Mutants of a protein: from ProteinGym's notation (A24G:C25D) or whole sequences to substitutions, and back.

Nothing here needs torch: the service reads mutations by it too. An offset counts from 0, a position from the number
that the first residue of the wild type has.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS

_MUTATION = re.compile(rf"([{AMINO_ACIDS}])([1-9][0-9]{{0,5}})([{AMINO_ACIDS}])")
_COLUMNS = {letter: column for column, letter in enumerate(AMINO_ACIDS)}


class Mutation(NamedTuple):
    """One letter for another."""

    wild: str
    offset: int
    mutant: str


@dataclass(frozen=True)
class Mutant:
    """Substitutions in the order of their offsets, no synonyms among them; or a sequence of another length."""

    mutations: tuple[Mutation, ...] = ()
    whole: str | None = None

    def sequence(self, wild: str) -> str:
        letters = list(wild if self.whole is None else self.whole)
        for mutation in self.mutations:
            letters[mutation.offset] = mutation.mutant
        return "".join(letters)


WILD_TYPE = Mutant()


@dataclass(frozen=True)
class Protein:
    """The wild type, the number of its first residue, and a name, where it is one of several."""

    sequence: str
    first: int = 1
    name: str = ""

    def mutation(self, text: str) -> Mutation:
        """Read A24G. Raises ValueError, whose message repeats no residue."""
        if text.endswith("*"):  # a nonsense mutant, as scans list them beside the others
            raise ValueError("a stop has no score")
        match = _MUTATION.fullmatch(text)
        if match is None:
            raise ValueError("is none; write it as A12G")
        offset = int(match[2]) - self.first
        if not 0 <= offset < len(self.sequence):
            raise ValueError(
                f"position {match[2]} is not of the sequence, which has {self.first} to "
                f"{self.first + len(self.sequence) - 1}"
            )
        # Almost always numbers that start elsewhere, which would else give scores of other mutants.
        if self.sequence[offset] != match[1]:
            raise ValueError(f"the sequence has another residue at position {match[2]}")
        return Mutation(match[1], offset, match[3])

    def mutant(self, text: str) -> Mutant:
        """Read A24G:C25D. Raises ValueError."""
        # Sorted, so that one mutant is equal however it is written, and computed once.
        mutations = sorted(map(self.mutation, text.split(":")), key=lambda mutation: mutation.offset)
        for before, after in pairwise(mutations):
            if before.offset == after.offset:
                raise ValueError(f"position {after.offset + self.first} is mutated twice")
        return Mutant(tuple(mutation for mutation in mutations if mutation.wild != mutation.mutant))

    def mutant_of(self, sequence: str) -> Mutant:
        """The mutant that a whole sequence is. Raises ValueError."""
        if not sequence:
            raise ValueError("the sequence is empty")
        # What the wild type has itself (X) is no mistake of the table.
        if unknown := {*sequence} - {*self.sequence, *AMINO_ACIDS}:
            raise ValueError(f"{min(unknown)!r} is no amino acid")
        if len(sequence) != len(self.sequence):
            return Mutant(whole=sequence)
        pairs = enumerate(zip(self.sequence, sequence, strict=True))
        mutations = tuple(Mutation(wild, offset, mutant) for offset, (wild, mutant) in pairs if wild != mutant)
        for wild, offset, mutant in mutations:
            if not {wild, mutant} <= {*AMINO_ACIDS}:
                raise ValueError(f"position {offset + self.first} is no amino acid in one of both sequences")
        return Mutant(mutations)

    def singles(self) -> Iterator[Mutant]:
        """All single mutants, in the order of positions and of :data:`AMINO_ACIDS`."""
        for offset, wild in enumerate(self.sequence):
            for letter in AMINO_ACIDS if wild in AMINO_ACIDS else "":
                if letter != wild:
                    yield Mutant((Mutation(wild, offset, letter),))

    def text(self, mutation: Mutation) -> str:
        return f"{mutation.wild}{mutation.offset + self.first}{mutation.mutant}"

    def text_of(self, mutant: Mutant) -> str:
        """A24G:C25D, or the whole sequence of an insertion or deletion."""
        return mutant.whole or ":".join(map(self.text, mutant.mutations))

    def read(self, text: str) -> Mutant:
        """The mutant that :meth:`text_of` wrote. Raises ValueError."""
        return self.mutant(text) if any(map(str.isdigit, text)) else self.mutant_of(text)


class Variant(NamedTuple):
    """A mutant of one of several proteins."""

    protein: Protein
    mutant: Mutant

    def sequence(self) -> str:
        return self.mutant.sequence(self.protein.sequence)


def marginal_scores(mutants: Sequence[Sequence[Mutation]], logs_L20: NDArray) -> NDArray[np.float64]:
    """(N,) sums of log p(mutant) - log p(wild type) over the mutations; 0 is as good as the wild type, above is better.

    That is the wild-type marginal where the sequence was whole, the masked marginal where each position was masked
    (Meier et al. 2021, NeurIPS, equations 1 and 2). ``logs_L20``: of :data:`AMINO_ACIDS` at each offset.
    """
    gains = [
        sum(logs_L20[offset, _COLUMNS[mutant]] - logs_L20[offset, _COLUMNS[wild]] for wild, offset, mutant in mutations)
        for mutations in mutants
    ]
    return np.array(gains, np.float64)
