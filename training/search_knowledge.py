"""What a throughput search has found out, and what follows from it for configurations that were not measured.

In: configurations and their measurements. Out: the fastest that fits, what can't fit, what hangs, what a change of one
setting did. Which configuration is measured next is decided in :mod:`training.throughput_search`.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, replace
from typing import Any

from training.search_space import needs_at_least
from training.throughput import Measurement, Settings
from training.trial_journal import was_measured

HANGS = 3
"""Trials with one value of a setting that have to hang for it to be given up."""


def fits(measurement: Measurement, memory_margin: float) -> bool:
    """Whether a configuration ran and left the margin of the device's memory free."""
    if measurement.status not in ("ok", "pruned") or not was_measured(measurement):
        return False
    return not _over_margin(measurement, memory_margin)


def is_too_large(measurement: Measurement, memory_margin: float) -> bool:
    """Whether memory ran out, or the margin was not left free."""
    return measurement.status == "out_of_memory" or _over_margin(measurement, memory_margin)


def _over_margin(measurement: Measurement, memory_margin: float) -> bool:
    peak, total = measurement.peak_memory_bytes, measurement.total_memory_bytes
    return peak is not None and total is not None and peak > (1 - memory_margin) * total


class Knowledge:
    """What a search has found out.

    Args:
        memory_margin: share of the memory that has to stay free.
        shares_memory: whether the workers of a machine share its memory, so that fewer of them have more each.
    """

    def __init__(self, memory_margin: float, shares_memory: bool = False) -> None:
        self._margin, self._shares_memory = memory_margin, shares_memory
        self.measurements: dict[Settings, Measurement] = {}
        self._too_large: list[Settings] = []

    def learn(self, settings: Settings, measurement: Measurement) -> None:
        """Take up a result."""
        self.measurements[settings] = measurement
        if was_measured(measurement) and is_too_large(measurement, self._margin):
            self._too_large.append(settings)

    def fits(self, settings: Settings) -> bool:
        """Whether it was measured and fits."""
        return settings in self.measurements and fits(self.measurements[settings], self._margin)

    def speed(self, settings: Settings) -> float:
        """Tokens per second; 0 where it is not known or does not fit."""
        return (self.measurements[settings].tokens_per_s or 0.0) if self.fits(settings) else 0.0

    def best(self) -> Settings | None:
        """The fastest that was measured to the end and fits."""
        complete = [s for s, m in self.measurements.items() if m.status == "ok" and self.fits(s)]
        return max(complete, key=self.speed, default=None)

    def effect(self, one: Settings, other: Settings, name: str) -> float:
        """What a change of one setting did where all else was alike, as the mean logarithm of the ratio of speeds.

        0 where that is not known.
        """
        before, after = getattr(one, name), getattr(other, name)
        ratios = []
        for settings in self.measurements:
            changed = replace(settings, **{name: after})
            if getattr(settings, name) == before and self.fits(settings) and self.fits(changed):
                ratios.append(math.log(self.speed(changed) / self.speed(settings)))
        return statistics.mean(ratios) if ratios else 0.0

    def known_not_to_fit(self, settings: Settings) -> Settings | None:
        """A configuration that did not fit though it needs no more memory than this one."""
        return next(
            (
                other
                for other in self._too_large
                if needs_at_least(settings, other) and not (self._shares_memory and settings.workers < other.workers)
            ),
            None,
        )

    def known_to_hang(self, settings: Settings) -> str | None:
        """A value of a setting that is to blame for hangs, in words; None if there is none.

        With it every trial hung, and one of those ran with another value, all else but the budget alike. A hang costs
        the whole timeout. Other failures are soon over, and may lie in a combination of values.
        """
        for name, value in asdict(settings).items():
            alike = [s for s, m in self.measurements.items() if getattr(s, name) == value and was_measured(m)]
            if len(alike) < HANGS or any(self.measurements[s].status != "timeout" for s in alike):
                continue
            others = {_but(s, name) for s in self.measurements if self.fits(s)}
            if any(_but(s, name) in others for s in alike):
                return f"{name} {value} hung in each of {len(alike)} trials"
        return None


def of_two(first: Measurement, second: Measurement) -> Measurement:
    """What measuring the same configuration twice says: the mean. Where it failed, it is not to be relied upon."""
    if second.status != "ok" or not first.tokens_per_s or not second.tokens_per_s:
        return second
    figures = first.tokens_per_s, second.tokens_per_s
    peaks = [peak for peak in (first.peak_memory_bytes, second.peak_memory_bytes) if peak is not None]
    return replace(
        second,
        reason=f"{figures[1]:,.0f} tokens/s, and {figures[0]:,.0f} before",
        tokens_per_s=statistics.mean(figures),
        windows=[*first.windows, *second.windows],
        peak_memory_bytes=max(peaks, default=None),
    )


def disagreement(first: Measurement, mean: Measurement) -> float:
    """By which share two figures of a configuration differ, from the first and what :func:`of_two` makes of both."""
    if mean.status != "ok" or not first.tokens_per_s or not mean.tokens_per_s:
        return 0.0
    second = 2 * mean.tokens_per_s - first.tokens_per_s
    return 1 - min(first.tokens_per_s, second) / max(first.tokens_per_s, second)


def _but(settings: Settings, name: str) -> tuple[tuple[str, Any], ...]:
    """All else but this setting and the budget."""
    return tuple((other, value) for other, value in asdict(settings).items() if other not in (name, "tokens"))
