"""Calibrated probabilities and conformal sets of terms, fitted to the ranker's scores of annotated proteins.

Probabilities are the ranker's scores after a line through their logits (Platt 1999), which keeps their order.

A set contains on average at least the chosen share of a protein's terms in the aspect (as in
:mod:`esmeray.inference.calibration`). Proteins are grouped by their nearest annotated protein, and each group has its
own thresholds, so that the share holds at each similarity. Sets follow the order of the scores. The ranker leaves out
most terms, so those without a score follow behind, by frequency.

Shape legend: N proteins, V terms of an aspect, I true terms of all proteins, K scores.
"""

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse import csr_array
from scipy.special import logit

from esmeray.inference.calibration import Calibration, quantiles
from esmeray.model.metrics.weighted import CalibrationError

EDGES = (0.3, 0.6, 1.0)
"""Bounds of the groups: bits per residue of the best hit. Identical proteins have about 2."""
FREQUENCIES = (0, 0.001, 0.01, 0.1, np.inf)
"""Bounds of groups of terms, as shares of the annotated proteins; calibration errors are reported for each."""
_FLOOR = 1e-6
"""Smallest probability whose logit is fitted."""
_MIN_GROUP = 50
"""Minimum number of calibrating proteins of a group; a smaller one has the thresholds of all proteins."""


def fit_sets(
    terms: csr_array, scores: csr_array, frequency_V: NDArray[np.float64], nearest_N: NDArray[np.float64]
) -> Calibration:
    """Return the logits' line, and each group's thresholds up to the coverage that scores and frequencies reach."""
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
    temperature, shift = _line(*_pairs(scores, terms)[2:])
    return Calibration(
        kind="multilabel", records=len(nearest_N), thresholds=thresholds, temperature=temperature, shift=shift
    )


def in_sets(
    scores: csr_array,
    frequency_V: NDArray[np.float64],
    nearest_N: NDArray[np.float64],
    thresholds: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Return (N, V) True for terms in the set of their protein, by the thresholds of the groups."""
    return _distance(scores.toarray(), frequency_V) <= thresholds[np.digitize(nearest_N, EDGES), None]


def calibrated(scores: csr_array, calibration: Calibration | None) -> csr_array:
    """Return the scores as calibrated probabilities, in the same order; without a calibration, as they are."""
    if calibration is None:
        return scores
    return csr_array((calibration.probabilities(scores.data), scores.indices, scores.indptr), shape=scores.shape)


def pairs_of(
    terms: csr_array,
    scores: csr_array,
    frequency_V: NDArray[np.float64],
    nearest_N: NDArray[np.float64],
    calibration: Calibration,
) -> pd.DataFrame:
    """Return a row per scored term of a protein: frequency, bits per residue, score, probability, and if it is true."""
    rows_K, columns_K, score_K, is_true_K = _pairs(scores, terms)
    columns = {
        "frequency": pd.cut(frequency_V[columns_K], FREQUENCIES, right=False),
        "bits": bins_of(nearest_N)[rows_K],
        "score": score_K,
        "probability": calibration.probabilities(score_K),
        "is_true": is_true_K,
    }
    return pd.DataFrame(columns)


def calibration_errors(pairs: pd.DataFrame) -> pd.Series:
    """Return the number of pairs, and the expected calibration error of scores and probabilities."""
    outcomes_1K = pairs["is_true"].to_numpy()[None]
    every_1K = np.ones_like(outcomes_1K)
    errors = {
        f"error_of_{name}": float(CalibrationError(pairs[name].to_numpy()[None], outcomes_1K, every_1K)(np.ones(1)))
        for name in ("score", "probability")
    }
    return pd.Series({"terms": len(pairs), **errors})


def bins_of(nearest_N: NDArray[np.float64]) -> pd.Categorical:
    """Return the group of each protein, as bits per residue of its best hit."""
    return pd.cut(nearest_N, [0, *EDGES, np.inf], right=False)


def _distance(scores: NDArray, frequencies: NDArray) -> NDArray[np.float32]:
    """1 - score, or 2 - frequency of the term without a score."""
    return 1 - np.where(scores > 0, scores, frequencies - 1).astype(np.float32)


def _pairs(scores: csr_array, terms: csr_array) -> tuple[NDArray, ...]:
    """Return (K,) rows, columns and scores of scored terms, and if they are true."""
    rows_K, columns_K = scores.nonzero()
    if not len(rows_K):  # scipy 1.17 returns a sparse array for empty indices
        return rows_K, columns_K, np.zeros(0), np.zeros(0, bool)
    return rows_K, columns_K, scores[rows_K, columns_K], terms[rows_K, columns_K]


def _line(scores_K: NDArray, is_true_K: NDArray[np.bool_]) -> tuple[float, float]:
    """Return the divisor of the logits and the shift with the highest likelihood."""
    true, total = is_true_K.sum(), len(is_true_K)
    # Not quite 0 and 1 (Platt 1999, equation 3): otherwise, the logits of separable scores would be infinite.
    targets_K = np.where(is_true_K, (true + 1) / (true + 2), 1 / (total - true + 2))
    logits_K = logit(np.clip(scores_K.astype(float), _FLOOR, 1 - _FLOOR))

    def loss(line: NDArray[np.float64]) -> float:
        moved_K = logits_K * math.exp(line[0]) + line[1]
        return float(np.sum(np.logaddexp(0, moved_K) - targets_K * moved_K)) / max(total, 1)

    log_slope, shift = minimize(loss, [0.0, 0.0], bounds=[(-3, 3), (-20, 20)]).x
    return math.exp(-log_slope), float(shift)
