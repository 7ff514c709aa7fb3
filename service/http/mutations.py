"""Mutations and masks of a request, and scores of its mutations (:mod:`inference.mutations.variants`)."""

import numpy as np
from numpy.typing import NDArray

from dataset.fasta.alphabet import MASK_TEXT
from inference.mutations.variants import Mutation, Protein, marginal_scores
from service.http.refusals import RefusalError


def mutations_of(texts: list[str] | None, sequences: list[str]) -> list[Mutation] | None:
    """Mutations of the only sequence. Raises RefusalError (422) for those that are not of it."""
    if texts is None:
        return None
    if len(sequences) != 1:
        raise RefusalError(422, "mutations: are of a single sequence")
    mutations, protein = [], Protein(sequences[0].replace(MASK_TEXT, "#"))
    for number, text in enumerate(texts):
        try:
            mutations.append(protein.mutation(text))
        except ValueError as error:
            raise RefusalError(422, f"mutations.{number}: {error}") from None
    return mutations


def scores(mutations: list[Mutation], probabilities_L20: NDArray[np.float32]) -> NDArray[np.float32]:
    """Score of each mutation; 0 is as good as the wild type, above is better."""
    logs_L20 = np.log(np.maximum(probabilities_L20, np.finfo(np.float32).tiny))
    return marginal_scores([[mutation] for mutation in mutations], logs_L20).astype(np.float32)
