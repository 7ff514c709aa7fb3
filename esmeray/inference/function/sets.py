"""Conformal sets of terms, fitted to the ranker's cross-fitted scores of a run's held-out proteins.

A set contains on average at least the chosen share of a protein's terms in the aspect (as in
:mod:`esmeray.inference.calibration`). Proteins are grouped by their nearest annotated protein, and each group has its
own thresholds, so that the share holds at each similarity. Sets follow the order of the scores. The ranker leaves out
most terms, so those without a score follow behind, by frequency.

Shape legend: N proteins, V terms of an aspect.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from esmeray.inference.calibration import Calibration, quantiles, thresholds_of

_EDGES = (0.3, 0.6, 1.0)
"""Bounds of the groups: bits per residue of the best hit. Identical proteins have about 2."""
_MIN_GROUP = 50
"""Minimum number of held-out proteins of a group; a smaller one has the thresholds of all proteins."""


def fit_sets(
    scores: csr_array, terms: csr_array, frequency_V: NDArray[np.float64], nearest_N: NDArray[np.float64]
) -> Calibration:
    """Return the thresholds of each group, up to the highest coverage that scores and frequencies reach."""
    distance_NV = _distance(scores, frequency_V)
    group_N = np.digitize(nearest_N, _EDGES)
    thresholds = []
    for group in range(len(_EDGES) + 1):
        chosen_N = group_N == group
        if chosen_N.sum() < _MIN_GROUP:
            chosen_N[:] = True
        rows, columns = np.nonzero(terms.toarray() & chosen_N[:, None])
        thresholds.append([value for value in quantiles(distance_NV[rows, columns], rows) if value < 2])
    return Calibration(kind="multilabel", records=len(nearest_N), thresholds=thresholds)


def in_sets(
    scores: csr_array,
    frequency_V: NDArray[np.float64],
    nearest_N: NDArray[np.float64],
    calibration: Calibration | None,
    coverage: float,
) -> NDArray[np.bool_]:
    """Return (N, V) True for terms in the set of their protein. Raises ConfigError if no set has this coverage."""
    thresholds_N = thresholds_of(calibration, coverage)[np.digitize(nearest_N, _EDGES)]
    return _distance(scores, frequency_V) <= thresholds_N[:, None]


def _distance(scores: csr_array, frequency_V: NDArray[np.float64]) -> NDArray[np.float32]:
    """(N, V) 1 - score, or 2 - frequency without a score."""
    dense_NV = scores.toarray().astype(np.float32)
    return 1 - np.where(dense_NV > 0, dense_NV, frequency_V.astype(np.float32) - 1)
