"""Protein vectors of a run: composition, which needs no model, or a folder of embeddings.

Shape legend: R records, N sequences, C channels.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError, expanded
from esmeray.dataset.embeddings.reader import open_vectors
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS, kmers
from esmeray.dataset.identifiers import match_ids
from esmeray.dataset.store.reader import Store
from esmeray.function.section import COMPOSITION, EmbeddingsSection

Vectors = NDArray[np.float32]
# Triples of chemical groups: most of the 8,000 triples of amino acids would be 0 in a protein of a few hundred
# residues.
_GROUPS = ("AST", "C", "DE", "FWY", "GP", "HKR", "ILMV", "NQ")
_KINDS = ((tuple(AMINO_ACIDS), 1), (tuple(AMINO_ACIDS), 2), (_GROUPS, 3))
CHANNELS = sum(len(groups) ** length for groups, length in _KINDS)


def composition(sequences: Sequence[str]) -> Vectors:
    """Return (N, C) square roots of the frequencies of the 20 amino acids, their 400 pairs, and 512 triples of groups.

    Each kind has norm 1, so that cosines compare distributions (Bhattacharyya). Words with letters other than amino
    acids do not count.
    """
    vectors_NC = np.zeros((len(sequences), CHANNELS), np.float32)
    for row_C, text in zip(vectors_NC, sequences, strict=True):
        residues = np.frombuffer(text.encode(), np.uint8)
        kinds = [
            np.bincount(kmers(residues, groups, length), minlength=len(groups) ** length) for groups, length in _KINDS
        ]
        # Each kind is normalised by its own number of words: single residues would otherwise weigh more than triples.
        row_C[:] = np.concatenate([np.sqrt(counts / max(1, counts.sum())) for counts in kinds])
    return vectors_NC


def read_vectors(store: Store, settings: EmbeddingsSection) -> Vectors:
    """Return (R, C) vectors of all records of a store.

    Raises DataError if the embeddings that the settings name lack a record, or one is not finite.
    """
    if settings.model == COMPOSITION:
        return composition([store.text(record) for record in range(len(store))])
    folder = expanded(str(settings.store))
    embeddings = open_vectors(folder, "mean")
    ids = [store.id(record) for record in range(len(store))]
    # Matched by id, not by order: the folder may also hold other proteins, e.g. the sequences to predict.
    matches = match_ids(ids, embeddings.numbers, "the sequences", folder)
    if lost := next((name for name in ids if name not in matches), None):
        raise DataError(f"{folder}: no embedding for {lost}; embed all sequences of the run")
    numbers_R = np.array([embeddings.numbers[matches[name]] for name in ids])
    embeddings.refuse_other_sequences(numbers_R, store.sequence_keys(np.arange(len(store))), store.path)
    return np.concatenate([block_nC for _, block_nC in embeddings.finite_blocks()])[numbers_R]


class VectorRows:
    """Vectors by record, with the interface that batches of features read."""

    def __init__(self, vectors_RC: Vectors) -> None:
        self.vectors_RC = vectors_RC

    def rows(self, records_N: NDArray[np.int64]) -> Iterator[Vectors]:
        """Yield the (1, C) vectors of each record."""
        return iter(self.vectors_RC[records_N][:, None])
