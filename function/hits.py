"""Similar annotated proteins of each query, by alignment.

In: sequences of queries and of annotated proteins. Out: bit scores of local alignments, sparse. Candidates share
4-letter words with the query; those that share the most and rarest are aligned with parasail (Smith-Waterman,
BLOSUM62, gaps 11 and 1).

Shape legend: N queries, M annotated proteins.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from scipy.sparse import csr_array, diags_array

from dataset.fasta.alphabet import AMINO_ACIDS
from function.composition import words
from train_config.function_schema import HomologySection

LAMBDA, K = 0.267, 0.041
"""Gapped constants of BLOSUM62 with gaps 11 and 1 (Karlin and Altschul; BLAST's blast_stat.c)."""
_WORD = 4
_AT_ONCE = 512


def hits(queries: Sequence[str], annotated: Sequence[str], settings: HomologySection) -> csr_array:
    """(N, M) float64 bit scores of the pairs whose E-value is small enough; no place where there is none."""
    shape = len(queries), len(annotated)
    if not queries or not annotated:
        return csr_array(shape)
    known = _words(annotated)
    rarity = np.log((1 + len(annotated)) / np.maximum(1, np.bincount(known.indices, minlength=known.shape[1])))
    known = known @ diags_array(rarity)
    size = np.sqrt(np.maximum(1, [len(text) for text in annotated]))
    residues = sum(map(len, annotated))

    def aligned(place: int, candidates: Sequence[int]) -> list[tuple[int, int, float]]:
        least = math.log2(max(1, len(queries[place])) * residues / settings.max_evalue)
        bits = _bit_scores(queries[place], [annotated[other] for other in candidates])
        return [(place, other, score) for other, score in zip(candidates, bits, strict=True) if score >= least]

    found: list[tuple[int, int, float]] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(queries), _AT_ONCE):
            shared = csr_array(_words(queries[start : start + _AT_ONCE]) @ known.T) @ diags_array(1 / size)
            places = [slice(*shared.indptr[row : row + 2]) for row in range(shared.shape[0])]
            chosen = [_largest(shared.indices[place], shared.data[place], settings.candidates) for place in places]
            for some in pool.map(aligned, range(start, start + len(places)), chosen):
                found += some
    rows, columns, scores = zip(*found, strict=True) if found else ((), (), ())
    return csr_array((np.array(scores, float), (np.array(rows, int), np.array(columns, int))), shape=shape)


def _words(texts: Sequence[str]) -> csr_array:
    """(n, words) 1 where a text has a word of amino acids."""
    columns = [np.unique(words(np.frombuffer(text.encode(), np.uint8), AMINO_ACIDS, _WORD)) for text in texts]
    ends = np.cumsum([0, *map(len, columns)])
    shape = len(texts), len(AMINO_ACIDS) ** _WORD
    return csr_array((np.ones(ends[-1], np.float32), np.concatenate(columns), ends), shape=shape)


def _largest(columns: np.ndarray, values: np.ndarray, number: int) -> list[int]:
    """The columns of the largest values; of equal ones the first."""
    chosen: list[int] = columns[np.lexsort((columns, -values))[:number]].tolist()
    return chosen


def _bit_scores(query: str, others: Sequence[str]) -> list[float]:
    import parasail  # here: it loads a library of 20 MB

    profile = parasail.profile_create_sat(query, parasail.blosum62)
    scores = (parasail.sw_striped_profile_sat(profile, other, 12, 1).score for other in others)
    return [(LAMBDA * score - math.log(K)) / math.log(2) for score in scores]
