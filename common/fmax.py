"""Fmax as CAFA has it (Radivojac et al. 2013, equations 1 to 3), of terms or labels at each of many thresholds.

At each threshold, precision is the mean over the records with at least one prediction, recall the mean over all
records; F is their harmonic mean, and Fmax the highest F.

Shape legend: N records, T thresholds.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def counts_reaching(
    records: NDArray[np.integer],
    reached: NDArray[np.integer],
    shape: tuple[int, int],
    weights: NDArray[np.float64] | None = None,
) -> NDArray:
    """(N, T): how many predictions of each record reach each threshold, or their weights together.

    Of each prediction: its record, and how many of the thresholds its score reaches, from the lowest on.
    """
    bins = shape[1] + 1
    histogram = np.bincount(records * bins + reached, weights, minlength=shape[0] * bins).reshape(shape[0], bins)
    return histogram[:, :0:-1].cumsum(axis=1)[:, ::-1]


def ratio(above: Any, below: Any) -> NDArray[np.float64]:
    """The quotient; 0 where nothing is below."""
    above, below = np.broadcast_arrays(np.asarray(above, dtype=np.float64), below)
    return np.divide(above, below, out=np.zeros(above.shape), where=below > 0)


def f_measure(precision: NDArray[np.float64], recall: NDArray[np.float64]) -> NDArray[np.float64]:
    """Harmonic mean of precision and recall; 0 where both are."""
    return ratio(2 * precision * recall, precision + recall)
