"""The bootstrap: N records drawn anew with replacement, S times, and the interval of what they give."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

SHARE = 0.95
_MOST_UNDEFINED = 0.5


def resamplings(records: int, samples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """(N,) how often each record is drawn, of so many resamplings; the same seed draws the same."""
    random = np.random.default_rng(seed)
    for _ in range(samples):
        yield np.bincount(random.integers(records, size=records), minlength=records)


def percentile_interval(values_S: ArrayLike) -> tuple[float, float] | None:
    """Percentile interval (Efron and Tibshirani 1993, section 13.3) that holds :data:`SHARE` of the resampled values.

    None where a value is undefined (NaN or infinite) in more than half of the resamplings, or there are none.
    """
    values_S = np.asarray(values_S, dtype=np.float64)
    defined_S = values_S[np.isfinite(values_S)]
    if len(defined_S) < max(1, _MOST_UNDEFINED * len(values_S)):
        return None
    low, high = np.quantile(defined_S, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return float(low), float(high)
