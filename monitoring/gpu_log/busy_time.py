"""When a GPU worked and when it did not: its usual load, where work begins and ends, and the gaps between.

In: times and utilisation of one GPU. Out: masks and half-open ranges of samples. What a gap comes from is left to
:mod:`monitoring.gpu_log.idle_gaps`.

Shape legend: S samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

IDLE_SHARE = 0.5
"""Under this share of its usual load a GPU counts as idle."""
UNUSED_PERCENT = 10.0
LEAST_WORK_SHARE = 0.001
"""A GPU that is above this for less than this share of the samples did nothing."""
_SUSTAINED_SAMPLES = 5
_SUSTAINED_SHARE = 0.6
"""Work has begun where this share of the next samples is busy: a stray kernel while a model loads is none."""
_LONGEST_STEP = 3.0
"""A sample stands for at most this many usual distances between samples: beyond, the log has a hole."""


@dataclass(frozen=True)
class Span:
    """Samples ``first`` to ``last``, the latter not included."""

    first: int
    last: int

    @property
    def samples(self) -> slice:
        """Cuts an array of one value a sample to the span."""
        return slice(self.first, self.last)


@dataclass(frozen=True)
class BusyTime:
    """What one GPU's utilisation says of when it worked.

    Attributes:
        time_s: (S,) rising.
        util_percent: (S,), NaN where not known.
    """

    time_s: Floats
    util_percent: Floats

    @cached_property
    def interval_s(self) -> float:
        """Usual distance between samples."""
        steps = np.diff(self.time_s)
        steps = steps[steps > 0]
        return float(np.median(steps)) if len(steps) else 1.0

    @cached_property
    def weight_s(self) -> Floats:
        """(S,) seconds that each sample stands for."""
        steps = np.append(np.diff(self.time_s), self.interval_s)
        return np.minimum(steps, _LONGEST_STEP * self.interval_s)

    @cached_property
    def level_percent(self) -> float:
        """The usual utilisation while working; 0 if it never did."""
        known = self.util_percent[np.isfinite(self.util_percent)]
        active = known[known >= UNUSED_PERCENT]
        if len(active) < max(_SUSTAINED_SAMPLES, LEAST_WORK_SHARE * len(known)):
            return 0.0
        top = float(np.percentile(active, 95))
        return float(np.median(known[known >= IDLE_SHARE * top]))

    @cached_property
    def busy(self) -> Mask:
        """(S,) samples with at least half of the usual utilisation; one that is not known counts as its predecessor."""
        if self.level_percent == 0:
            return np.zeros(len(self.time_s), bool)
        known = np.isfinite(self.util_percent)
        latest = np.maximum.accumulate(np.where(known, np.arange(len(known)), 0))
        with np.errstate(invalid="ignore"):
            return self.util_percent[latest] >= IDLE_SHARE * self.level_percent

    @cached_property
    def work(self) -> Span:
        """From the first sample of sustained work to the last; empty if there is none."""
        first, last = _sustained_start(self.busy), len(self.busy) - _sustained_start(self.busy[::-1])
        return Span(first, max(first, last))

    @cached_property
    def gaps(self) -> list[Span]:
        """Idle stretches within the work."""
        return [span for span in runs(~self.busy) if span.first >= self.work.first and span.last <= self.work.last]

    @cached_property
    def steady(self) -> Mask:
        """(S,) busy samples within the work."""
        inside = np.zeros(len(self.busy), bool)
        inside[self.work.samples] = True
        return inside & self.busy

    def seconds(self, span: Span) -> float:
        """That the samples stand for."""
        return float(self.weight_s[span.samples].sum())


def runs(mask: Mask, bridge: int = 0) -> list[Span]:
    """Stretches where ``mask`` (S,) holds; two that are at most ``bridge`` samples apart are one."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    spans: list[Span] = []
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if spans and first - spans[-1].last <= bridge:
            spans[-1] = Span(spans[-1].first, last)
        else:
            spans.append(Span(first, last))
    return spans


def _sustained_start(busy: Mask) -> int:
    """The first busy sample after which most are busy; the number of samples if there is none."""
    counts = np.concatenate([[0], np.cumsum(busy)])
    for place in np.flatnonzero(busy).tolist():
        end = min(place + _SUSTAINED_SAMPLES, len(busy))
        if counts[end] - counts[place] >= _SUSTAINED_SHARE * (end - place):
            return place
    return len(busy)
