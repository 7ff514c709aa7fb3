"""Conformal sets of terms, fitted to the ranker's scores of annotated proteins.

A set contains on average at least the chosen share of a protein's terms in the aspect (as in
:mod:`esmeray.inference.calibration`). Proteins are grouped by their nearest annotated protein, and each group has its
own thresholds, so that the share holds at each similarity. Sets follow the order of the scores. The ranker leaves out
most terms, so those without a score follow behind, by frequency.

Shape legend: N proteins, V terms of an aspect, I true terms of all proteins.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from esmeray.inference.calibration import Calibration, quantiles

EDGES = (0.3, 0.6, 1.0)
"""Bounds of the groups: bits per residue of the best hit. Identical proteins have about 2."""
_MIN_GROUP = 50
"""Minimum number of calibrating proteins of a group; a smaller one has the thresholds of all proteins."""


def fit_sets(
    terms: csr_array, scores: csr_array, frequency_V: NDArray[np.float64], nearest_N: NDArray[np.float64]
) -> Calibration:
    """Return the thresholds of each group, up to the highest coverage that scores and frequencies reach."""
    rows_I, columns_I = terms.nonzero()
    distance_I = _distance(scores[rows_I, columns_I], frequency_V[columns_I])
    group_N = np.digitize(nearest_N, EDGES)
    thresholds = []
    for group in range(len(EDGES) + 1):
        chosen_N = group_N == group
        if chosen_N.sum() < _MIN_GROUP:
            chosen_N[:] = True
        chosen_I = chosen_N[rows_I]
        thresholds.append([value for value in quantiles(distance_I[chosen_I], rows_I[chosen_I]) if value < 2])
    return Calibration(kind="multilabel", records=len(nearest_N), thresholds=thresholds)


def in_sets(
    scores: csr_array,
    frequency_V: NDArray[np.float64],
    nearest_N: NDArray[np.float64],
    thresholds: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Return (N, V) True for terms in the set of their protein, by the thresholds of the groups."""
    return _distance(scores.toarray(), frequency_V) <= thresholds[np.digitize(nearest_N, EDGES), None]


def _distance(scores: NDArray, frequencies: NDArray) -> NDArray[np.float32]:
    """1 - score, or 2 - frequency of the term without a score."""
    return 1 - np.where(scores > 0, scores, frequencies - 1).astype(np.float32)
