"""Choose the next configuration to measure: find the largest budget that fits, then ask Optuna's sampler.

The search starts with the experiment's own configuration, and finds its largest token budget by doubling and bisecting.
Then it measures the valid, untried configuration nearest to the sampler's suggestion. Configurations that need at least
the memory of one that was too large are left out.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import optuna
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from esmeray.tuning.records import NAMES, Measurement, Settings, Trial, read_trials
from esmeray.tuning.section import SearchSection, TuneConfig
from esmeray.tuning.space import ORDERED, SearchSpace, most_trials, needs_at_least
from esmeray.tuning.trainable import METRIC

STARTUP_TRIALS = 6
"""Results that TPE needs before it builds a model."""


class Search(OptunaSearch):
    """Ray Tune's Optuna searcher, for a space in which only some combinations are valid.

    It learns from the trials' files, so that a search that resumes, or has another limit, knows all measurements.
    """

    def __init__(self, space: SearchSpace, search: TuneConfig, trials: Path) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        super().__init__(
            {name: _distribution(space, name) for name in NAMES},
            metric=METRIC,
            mode="max",
            sampler=_sampler(search.search, len(read_trials(trials))),
        )
        self._configurations = space
        self._search = search.search
        self._margin = search.memory_margin
        self._trials = trials
        self._results: dict[str, Trial] = {}
        self._running: dict[str, Settings] = {}

    def suggest(self, trial_id: str) -> Any:
        """Return the settings of the next trial and the speed that it has to beat; FINISHED at the end."""
        self._learn()
        untried = self._untried()
        if not untried or self._is_over():
            return Searcher.FINISHED
        params = super().suggest(trial_id)
        assert params is not None
        values = {name: self._configurations.values[name][index] for name, index in params.items()}
        # The sampler treats settings as independent: its suggestion may be invalid or already measured.
        settings = self._bracket(untried) or self._configurations.nearest(Settings(**values), untried)
        self._running[trial_id] = settings
        return {"settings": asdict(settings), "to_beat": self._to_beat()}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Discard the sampler's suggestion: the trial's file has the settings that were measured instead."""
        if self._running.pop(trial_id, None) is not None:
            super().on_trial_complete(trial_id, error=True)

    def _learn(self) -> None:
        """Add the trials that ended since the last call to Optuna's study."""
        space = self._configurations
        for trial in read_trials(self._trials):
            if trial.id in self._results:
                continue
            self._results[trial.id] = trial
            values = asdict(trial.settings)
            if all(values[name] in space.values[name] for name in NAMES):  # a resumed search may have a smaller space
                indices = {name: space.values[name].index(values[name]) for name in NAMES}
                # Failures count as a speed of 0, so that the sampler avoids them.
                self.add_evaluated_point(indices, trial.measurement.speed(self._margin))

    @property
    def _measurements(self) -> dict[Settings, Measurement]:
        return {trial.settings: trial.measurement for trial in self._results.values()}

    def _is_over(self) -> bool:
        # Only measuring time counts: a search that was stopped for the night keeps the rest of its time budget.
        seconds = sum(result.seconds for result in self._measurements.values())
        out_of_time = self._search.time_budget_s is not None and seconds >= self._search.time_budget_s
        return out_of_time or len(self._tried()) >= most_trials(self._search, len(self._configurations))

    def _tried(self) -> set[Settings]:
        return self._measurements.keys() | set(self._running.values())

    def _to_beat(self) -> float | None:
        """Return the speed below which a trial can stop early."""
        if self._search.algorithm == "grid":
            return None
        # Only fully measured trials: the speed of one that was stopped early comes from windows that did not agree.
        complete = (result for result in self._measurements.values() if result.status == "ok")
        return max((result.speed(self._margin) for result in complete), default=0.0) or None

    def _untried(self) -> list[Settings]:
        """Return untried configurations that may fit, given the measurements so far."""
        too_large = [s for s, result in self._measurements.items() if result.is_too_large(self._margin)]
        tried = self._tried()
        return [
            settings
            for settings in self._configurations.settings
            if settings not in tried
            and not any(needs_at_least(settings, other) for other in too_large)
            and not self._is_expected_too_large(settings)
        ]

    def _is_expected_too_large(self, settings: Settings) -> bool:
        """Extrapolate the memory from the two largest measured budgets with all other settings equal.

        On a CPU, a trial that runs out of memory could take memory from other programs.
        """
        alike = [
            (other.tokens, result.peak_memory_bytes, result.total_memory_bytes)
            for other, result in self._measurements.items()
            if result.peak_memory_bytes and result.total_memory_bytes and result.status in ("ok", "pruned")
            if replace(other, tokens=settings.tokens) == settings
        ]
        if len(alike) < 2:
            return False
        (low, low_bytes, _), (high, high_bytes, total_bytes) = sorted(alike)[-2:]
        token_bytes = max(0, high_bytes - low_bytes) / (high - low)
        return high_bytes + token_bytes * (settings.tokens - high) > total_bytes

    def _bracket(self, untried: Sequence[Settings]) -> Settings | None:
        """Return the next step of finding the own settings' largest budget; None while one runs, or once it is
        known."""
        own = self._configurations.default
        measurements = self._measurements
        if own in untried:
            return own
        ladder = self._configurations.ladder(own)
        fitting = [s.tokens for s in ladder if s in measurements and measurements[s].fits(self._margin)]
        # Budgets that were ruled out without a measurement count as too large; running ones are still unknown.
        ended = [s.tokens for s in ladder if s not in untried and s not in self._running.values()]
        tokens = next_budget([s.tokens for s in ladder], fitting, [t for t in ended if t not in fitting])
        proposal = replace(own, tokens=tokens or own.tokens)
        return proposal if proposal in untried else None


def next_budget(budgets: Sequence[int], fitting: Sequence[int], too_large: Sequence[int]) -> int | None:
    """Return the budget to try next by doubling, then by bisecting; None once the largest that fits is known."""
    largest = max(fitting, default=0)
    least = min((tokens for tokens in too_large if tokens > largest), default=math.inf)
    between = [tokens for tokens in budgets if largest < tokens < least]
    if not between:
        return None
    # If none fits yet, go down by halves, since the own budget was too large.
    if not fitting:
        return next((tokens for tokens in between if 2 * tokens >= least), between[-1])
    if least == math.inf:
        return max((tokens for tokens in between if tokens <= 2 * largest), default=between[0])
    return between[(len(between) - 1) // 2]


def _sampler(search: SearchSection, known: int) -> optuna.samplers.BaseSampler:
    """Return the sampler of a search that already has ``known`` trials."""
    seed = search.seed + known  # a resumed search must not repeat its suggestions
    if search.algorithm == "tpe":
        # Constant liar: parallel trials must not get the same suggestion.
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True, constant_liar=True
        )
    return optuna.samplers.RandomSampler(seed=seed)


def _distribution(space: SearchSpace, name: str) -> optuna.distributions.BaseDistribution:
    """Return a distribution over the indices of the values; an integer one if the values are ordered."""
    last = len(space.values[name]) - 1
    if name in ORDERED and None not in space.values[name]:
        return optuna.distributions.IntDistribution(0, last)
    return optuna.distributions.CategoricalDistribution(tuple(range(last + 1)))
