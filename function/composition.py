"""Vectors of proteins without a model: frequencies of short words.

In: sequences. Out: square roots of the frequencies of the 20 amino acids, of their 400 pairs, and of 512 triples of
groups of like amino acids; each kind has length 1, so that cosines compare distributions (Bhattacharyya).

Shape legend: N sequences, C channels.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dataset.fasta.alphabet import AMINO_ACIDS, kmers

_GROUPS = ("AST", "C", "DE", "FWY", "GP", "HKR", "ILMV", "NQ")
_KINDS = ((tuple(AMINO_ACIDS), 1), (tuple(AMINO_ACIDS), 2), (_GROUPS, 3))
CHANNELS = sum(len(groups) ** length for groups, length in _KINDS)


def composition(sequences: Sequence[str]) -> NDArray[np.float32]:
    """(N, C) float32; words with other letters than amino acids do not count."""
    vectors_NC = np.zeros((len(sequences), CHANNELS), np.float32)
    for row_C, text in zip(vectors_NC, sequences, strict=True):
        residues, first = np.frombuffer(text.encode(), np.uint8), 0
        for groups, length in _KINDS:
            size = len(groups) ** length
            counts = np.bincount(kmers(residues, groups, length), minlength=size)
            row_C[first : first + size] = np.sqrt(counts / max(1, counts.sum()))
            first += size
    return vectors_NC
