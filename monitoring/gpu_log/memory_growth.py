"""Whether memory in use grows without end.

In: times and bytes. Out: a slope, if the growth is one that lasts. Blocks of samples are taken by their median, so
that peaks of a validation count little; the slope is Theil's and Sen's median over all pairs of blocks, which outliers
don't turn. An allocator that fills its cache and then stays is no leak: growth has to go on in the second half, at no
less than a good part of the pace.

Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63 (1968).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from monitoring.gpu_log.busy_time import Floats

_BLOCKS = 24
_LEAST_SAMPLES = 48
_SETTLING_SHARE = 0.2
"""Of the work's beginning, in which caches fill."""
_LEAST_RISE_SHARE = 0.02
"""Of all memory: less growth than this over the log is not told from noise."""
_LEAST_AGREEMENT = 0.5
"""Kendall's tau: pairs of blocks that rise, less those that fall."""
_LASTING_SHARE = 0.4
"""The second half's slope as a share of the whole's."""


@dataclass(frozen=True)
class Growth:
    """Memory that grows.

    Attributes:
        bytes_per_s: robust slope.
        risen_bytes: over the time that was looked at.
        full_in_s: until all of it is used at this pace, from the end of the log on.
    """

    bytes_per_s: float
    risen_bytes: float
    full_in_s: float


def lasting_growth(time_s: Floats, used_bytes: Floats, total_bytes: float) -> Growth | None:
    """The growth of memory in use, or None if it does not grow, or not for good.

    Args:
        time_s: (S,) rising, of samples while work goes on.
        used_bytes: (S,), NaN where not known.
        total_bytes: that there is.
    """
    known = np.isfinite(used_bytes)
    time_s, used_bytes = time_s[known], used_bytes[known]
    settled = slice(int(_SETTLING_SHARE * len(time_s)), None)
    time_s, used_bytes = time_s[settled], used_bytes[settled]
    if len(time_s) < _LEAST_SAMPLES or not total_bytes > 0:
        return None
    times = np.array([np.median(block) for block in np.array_split(time_s, _BLOCKS)])
    levels = np.array([np.median(block) for block in np.array_split(used_bytes, _BLOCKS)])
    slope, agreement = _theil_sen(times, levels)
    later_slope, _ = _theil_sen(times[_BLOCKS // 2 :], levels[_BLOCKS // 2 :])
    risen = slope * float(times[-1] - times[0])
    if risen < _LEAST_RISE_SHARE * total_bytes or agreement < _LEAST_AGREEMENT or later_slope < _LASTING_SHARE * slope:
        return None
    return Growth(slope, risen, max(0.0, total_bytes - float(levels[-1])) / slope)


def _theil_sen(x: Floats, y: Floats) -> tuple[float, float]:
    """Median slope over all pairs, and Kendall's tau."""
    first, second = np.triu_indices(len(x), k=1)
    rises = y[second] - y[first]
    return float(np.median(rises / (x[second] - x[first]))), float(np.sign(rises).mean())
