"""What a throughput search has found out, and what follows from it for configurations that were not measured.

In: configurations and their measurements. Out: the fastest that fits, what can't fit, what hangs. How fast the others
probably are is estimated in :mod:`tuning.speed_model`, which configuration is measured next decided in
:mod:`tuning.search`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from tuning.journal import was_measured
from tuning.settings import Measurement, Settings
from tuning.space import needs_at_least

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
        """What all trials of a configuration say together."""
        self.trials: dict[Settings, list[Measurement]] = {}
        """Those of each configuration, without what was concluded from others."""
        self._too_large: list[Settings] = []

    def learn(self, settings: Settings, measurement: Measurement) -> None:
        """Take up a trial of a configuration, its first or another one."""
        if not was_measured(measurement):
            self.measurements[settings] = measurement
            return
        trials = self.trials.setdefault(settings, [])
        trials.append(measurement)
        self.measurements[settings] = together(trials)
        if is_too_large(measurement, self._margin):
            self._too_large.append(settings)

    def fits(self, settings: Settings) -> bool:
        """Whether it was measured and fits."""
        return settings in self.measurements and fits(self.measurements[settings], self._margin)

    def speed(self, settings: Settings) -> float:
        """Tokens per second, the mean of its trials; 0 where it is not known or does not fit."""
        return (self.measurements[settings].tokens_per_s or 0.0) if self.fits(settings) else 0.0

    def best(self) -> Settings | None:
        """The fastest that was measured to the end and fits."""
        complete = [s for s, m in self.measurements.items() if m.status == "ok" and self.fits(s)]
        return max(complete, key=self.speed, default=None)

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

    def chance_to_fit(self, settings: Settings) -> float:
        """Rule of succession over what did not fit with no more tokens a batch, and what did with no fewer.

        Of configurations that need less memory than one that did not fit, some will fit; where none did, ever fewer.
        """
        tokens = settings.tokens
        failed = sum(other.tokens <= tokens for other in self._too_large)
        if not failed or self.fits(settings):
            return 1.0
        fitted = sum(other.tokens >= tokens and self.fits(other) for other in self.measurements)
        return (fitted + 1) / (fitted + failed + 1)

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


def together(trials: Sequence[Measurement]) -> Measurement:
    """What trials of the same configuration say: the mean of their figures and the largest peak.

    Where the last one failed, that is what counts: the configuration is not to be relied upon.
    """
    last = trials[-1]
    figures = [trial.tokens_per_s for trial in trials if trial.tokens_per_s]
    if len(trials) == 1 or last.status not in ("ok", "pruned") or not last.tokens_per_s:
        return last
    return replace(
        last,
        status="ok" if any(trial.status == "ok" for trial in trials) else "pruned",
        reason=f"{', '.join(f'{figure:,.0f}' for figure in figures)} tokens/s in {len(figures)} trials",
        tokens_per_s=statistics.mean(figures),
        windows=[window for trial in trials for window in trial.windows],
        peak_memory_bytes=max((t.peak_memory_bytes for t in trials if t.peak_memory_bytes is not None), default=None),
        seconds=sum(trial.seconds for trial in trials),
    )


def _but(settings: Settings, name: str) -> tuple[tuple[str, Any], ...]:
    """All else but this setting and the budget."""
    return tuple((other, value) for other, value in asdict(settings).items() if other not in (name, "tokens"))
