"""When a GPU ran slower than it could because it was too hot or drew too much power.

In: the trace of one GPU. Out: masks of samples. Two things tell: the driver's throttle reasons, and clocks well under
the highest while the GPU is busy and either hot or at its power limit. Either is enough, since logs lack the one or the
other, and reasons and clocks are read at slightly different moments.

Shape legend: S samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monitoring.gpu_log.busy_time import BusyTime, Floats, Mask, runs
from monitoring.gpu_log.reader import Trace
from monitoring.sampling.nvml import POWER_REASONS, SLOWDOWN, THERMAL_REASONS

HOT_C = 80.0
"""From here on lowered clocks are put down to heat. NVIDIA's slowdown temperatures lie between 83 and 95 °C."""
LOW_CLOCK_SHARE = 0.9
"""Under this share of the highest clock a busy GPU counts as slowed."""
AT_LIMIT_SHARE = 0.97
"""From this share of the power limit on, a GPU is at it: drivers hold the mean a little below."""
_SUSTAINED_SAMPLES = 3
_SETTINGS = 0x002 | 0x010 | 0x100
"""Reasons by which somebody chose lower clocks: application clocks, sync boost, display clocks."""


@dataclass(frozen=True)
class Throttling:
    """Samples of one kind.

    Attributes:
        by_reason: (S,) the driver says so.
        by_clock: (S,) clocks, temperature and power say so.
        clock_share: (S,) of the highest clock; NaN where not known.
    """

    by_reason: Mask
    by_clock: Mask
    clock_share: Floats

    @property
    def mask(self) -> Mask:
        """(S,) either says so."""
        return self.by_reason | self.by_clock

    @property
    def lost_share(self) -> float:
        """Part of the highest clock that is missing in these samples, on average; 0 if unknown."""
        shares = self.clock_share[self.mask & np.isfinite(self.clock_share)]
        return float(np.clip(1 - shares.mean(), 0, 1)) if len(shares) else 0.0


def find_throttling(trace: Trace, busy_time: BusyTime) -> tuple[Throttling, Throttling]:
    """Thermal and power throttling of the busy samples."""
    busy = busy_time.steady
    reasons = _reasons(trace)
    share = clock_share(trace, busy)
    temperature, power, limit = trace.get("temperature_c"), trace.get("power_w"), trace.get("power_limit_w")
    with np.errstate(invalid="ignore"):
        hot = temperature >= HOT_C
        at_limit = power >= AT_LIMIT_SHARE * limit
        slow = _sustained(busy & (share < LOW_CLOCK_SHARE) & ((reasons & _SETTINGS) == 0))
    thermal_said = busy & ((reasons & THERMAL_REASONS) != 0)
    power_said = busy & ((reasons & POWER_REASONS) != 0)
    unspecific = busy & ((reasons & SLOWDOWN) != 0) & ~thermal_said & ~power_said
    thermal_said |= unspecific & hot
    power_said |= unspecific & ~hot & at_limit
    thermal = Throttling(thermal_said, slow & hot & ~at_limit & ~power_said, share)
    return thermal, Throttling(power_said, slow & at_limit & ~thermal_said, share)


def clock_share(trace: Trace, busy: Mask) -> Floats:
    """(S,) SM clock as a share of the highest that the GPU has, or else of the highest that the log has seen."""
    clock = trace.get("sm_clock_mhz")
    highest = trace.get("sm_clock_max_mhz")
    if not np.isfinite(highest).any():
        seen = clock[busy & np.isfinite(clock)]
        highest = np.full(len(clock), np.percentile(seen, 99) if len(seen) else np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(highest > 0, clock / highest, np.nan)


def held_by_settings(trace: Trace) -> Mask:
    """(S,) samples whose clocks somebody chose to hold down."""
    return (_reasons(trace) & _SETTINGS) != 0


def _reasons(trace: Trace) -> NDArray[np.int64]:
    return np.nan_to_num(trace.get("throttle_reasons"), nan=0.0).astype(np.int64)


def _sustained(mask: Mask) -> Mask:
    """``mask`` without stretches of one or two samples: clocks take a moment to follow the load."""
    kept = np.zeros_like(mask)
    for span in runs(mask, bridge=1):
        if span.last - span.first >= _SUSTAINED_SAMPLES:
            kept[span.samples] = mask[span.samples]
    return kept
