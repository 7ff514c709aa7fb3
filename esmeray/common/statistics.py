"""Bootstrap intervals, and the sums behind Fmax.

Shape legend: N records, S resamplings, T thresholds.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

SHARE = 0.95
"""Share of the resampled values in an interval."""
RESAMPLINGS = 1000
"""Resamplings for an interval: its ends then differ by a few percent of its width between seeds."""


def resamplings(records: int, samples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield ``samples`` bootstrap resamplings: (N,) how often each record is drawn; reproducible for a seed."""
    random = np.random.default_rng(seed)
    for _ in range(samples):
        yield np.bincount(random.integers(records, size=records), minlength=records)


def percentile_interval(values_S: ArrayLike) -> tuple[float, float] | None:
    """Percentile interval (Efron and Tibshirani 1993, section 13.3) that holds :data:`SHARE` of the resampled values.

    None if there are no values, or more than half of them are NaN or infinite.
    """
    values_S = np.asarray(values_S, dtype=np.float64)
    defined_S = values_S[np.isfinite(values_S)]
    if len(defined_S) < max(1, len(values_S) / 2):
        return None
    low, high = np.quantile(defined_S, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return float(low), float(high)


def counts_reaching(
    records: NDArray[np.integer],
    reached: NDArray[np.integer],
    shape: tuple[int, int],
    weights: NDArray[np.float64] | None = None,
) -> NDArray:
    """(N, T): number of predictions per record that reach each threshold, or the sum of their weights.

    ``records`` is the record of each prediction; ``reached`` is how many thresholds its score reaches, from the lowest
    up. Fmax is CAFA's (Radivojac et al. 2013, equations 1 to 3): precision is the mean over the records with at least
    one prediction, recall the mean over all records; F is their harmonic mean, and Fmax the highest F.
    """
    # A histogram by thresholds reached, summed from the highest down: an array of predictions by thresholds would run
    # out of memory.
    bins = shape[1] + 1
    histogram = np.bincount(records * bins + reached, weights, minlength=shape[0] * bins).reshape(shape[0], bins)
    return histogram[:, :0:-1].cumsum(axis=1)[:, ::-1]


def ratio(above: Any, below: Any) -> NDArray[np.float64]:
    """Element-wise quotient; 0 if the denominator is not positive."""
    # np.divide leaves masked elements uninitialised without an output of zeros.
    above, below = np.broadcast_arrays(np.asarray(above, dtype=np.float64), below)
    return np.divide(above, below, out=np.zeros(above.shape), where=below > 0)


def f_measure(precision: NDArray[np.float64], recall: NDArray[np.float64]) -> NDArray[np.float64]:
    """Harmonic mean of precision and recall; 0 if both are 0."""
    return ratio(2 * precision * recall, precision + recall)
