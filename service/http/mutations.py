"""Scores of point mutations by a masked language model: log p(mutant) - log p(wild type) at the position.

That is the wild-type marginal where the sequence was whole, the masked marginal where the position was masked (Meier et
al. 2021, NeurIPS, equations 1 and 2).
"""

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataset.fasta.alphabet import AMINO_ACIDS, MASK_TEXT
from service.http.refusals import RefusalError

_MUTATION = re.compile(rf"([{AMINO_ACIDS}])([1-9][0-9]{{0,5}})([{AMINO_ACIDS}])")


class Mutation(NamedTuple):
    """One letter for another; ``place`` counts from 0."""

    wild: str
    place: int
    mutant: str


def mutations_of(texts: list[str] | None, sequences: list[str]) -> list[Mutation] | None:
    """Mutations of the only sequence. Raises RefusalError (422) for those that are not of it."""
    if texts is None:
        return None
    if len(sequences) != 1:
        raise RefusalError(422, "mutations: are of a single sequence")
    mutations, letters = [], sequences[0].replace(MASK_TEXT, "#")
    for number, text in enumerate(texts):
        match = _MUTATION.fullmatch(text)
        if match is None:
            raise RefusalError(422, f"mutations.{number}: is none; write it as A12G")
        mutation = Mutation(match[1], int(match[2]) - 1, match[3])
        if letters[mutation.place : mutation.place + 1] != mutation.wild:
            raise RefusalError(422, f"mutations.{number}: the sequence has another residue at position {match[2]}")
        mutations.append(mutation)
    return mutations


def masked_texts(sequence: str) -> list[str]:
    """The sequence with each of its positions masked in turn."""
    if MASK_TEXT in sequence:
        raise RefusalError(422, "method masked: masks every position itself; send sequences without <mask>")
    return [f"{sequence[:place]}{MASK_TEXT}{sequence[place + 1 :]}" for place in range(len(sequence))]


def scores(mutations: list[Mutation], probabilities: NDArray[np.float32]) -> NDArray[np.float32]:
    """Score of each mutation; 0 is as good as the wild type, above is better."""
    logs = np.log(np.maximum(probabilities, np.finfo(np.float32).tiny))
    columns = {letter: column for column, letter in enumerate(AMINO_ACIDS)}
    gains = [logs[place, columns[mutant]] - logs[place, columns[wild]] for wild, place, mutant in mutations]
    return np.array(gains, np.float32)
