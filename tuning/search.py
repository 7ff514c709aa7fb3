"""The choice of the next configuration to measure: an ask-and-tell study of Optuna with start points.

The order of the default algorithm:

1. bracket: the experiment's own configuration, and by doubling and bisecting the largest token budget that fits it;
2. refine: what is one step from the fastest in one setting, then one step from it with the next larger budget, where
   another setting may make room for it;
3. sample: Optuna's TPE (Bergstra et al. 2011), which knows all results so far;
4. confirm: the fastest once more, until its speed is the mean of two trials.

Nothing is measured that needs at least the memory of a configuration that was too large. The choice depends on the
results alone, so a search that is given its earlier results asks for the same configurations and then continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import optuna

from train_config.tune_schema import SearchSection, TuneConfig
from tuning.budgets import BudgetSearch
from tuning.journal import together
from tuning.settings import Measurement, Settings
from tuning.space import ORDERED, SearchSpace, needs_at_least

LEAST_TRIALS = 12
STARTUP_TRIALS = 6
"""Results that TPE needs before it models; the start points usually give them."""

CONFIRM = "confirm"
"""The phase that measures the fastest again."""


class Proposal(NamedTuple):
    """A configuration to measure, and the phase of the search."""

    settings: Settings
    phase: str


class Search:
    """Ask for a configuration, measure it, tell the result."""

    def __init__(self, space: SearchSpace, search: TuneConfig) -> None:
        self.space, self._search = space, search
        self.max_trials = most_trials(search.search, len(space))
        """Configurations to measure; the fastest measured again is not counted."""
        self.results: dict[Settings, list[Measurement]] = {}
        self._seconds = 0.0
        self._too_large: list[Settings] = []
        ladder = [settings.tokens for settings in space.ladder(space.default)]
        self._budgets = BudgetSearch(ladder, space.default.tokens, search.memory_margin)
        self._distributions = {name: _distribution(space, name) for name in space.varied}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(direction="maximize", sampler=_sampler(search.search))

    def ask(self) -> Proposal | None:
        """Return what to measure next; None when the search is over."""
        budget_s = self._search.search.time_budget_s
        if budget_s is not None and self._seconds >= budget_s:
            return None
        if len(self.results) < self.max_trials and (proposal := self._new()) is not None:
            return proposal
        return self._again()

    def tell(self, settings: Settings, measurement: Measurement) -> None:
        """Add the result of a trial."""
        self._seconds += measurement.seconds
        self.results.setdefault(settings, []).append(measurement)
        if measurement.is_too_large(self._search.memory_margin):
            self._too_large.append(settings)
        if replace(settings, tokens=self.space.default.tokens) == self.space.default:
            self._budgets.results[settings.tokens] = measurement
        places = {name: self.space.values[name].index(getattr(settings, name)) for name in self._distributions}
        self._study.add_trial(
            optuna.trial.create_trial(params=places, distributions=self._distributions, value=self.speed(settings))
        )

    def best(self) -> Settings | None:
        """Return the fastest that was measured to the end and fits."""
        return max(filter(self._is_complete, self.results), key=self.speed, default=None)

    def speed(self, settings: Settings) -> float:
        """Return the mean tokens per second of its trials; 0 where one of them failed or was too large."""
        return together(self.results[settings]).speed(self._search.memory_margin)

    def to_beat(self, proposal: Proposal) -> float | None:
        """Return the speed below which a trial need not be measured to the end."""
        best = self.best()
        if best is None or proposal.phase == CONFIRM or self._search.search.algorithm == "grid":
            return None
        return self.speed(best)

    def _is_complete(self, settings: Settings) -> bool:
        return together(self.results[settings]).status == "ok" and self.speed(settings) > 0

    def _new(self) -> Proposal | None:
        algorithm = self._search.search.algorithm
        untried = [settings for settings in self.space.settings if self._is_open(settings)]
        if not untried:
            return None
        if algorithm == "grid":
            return Proposal(untried[0], "grid")
        if (tokens := self._budgets.ask()) is not None:
            bracket = replace(self.space.default, tokens=tokens)
            if bracket in untried:
                return Proposal(bracket, "bracket")
        best, least = self.best(), self.space.settings[0]
        if best is None and least in untried:  # if the one that needs least memory does not fit, none does
            return Proposal(least, "bracket")
        if best is not None and algorithm == "tpe" and (nearby := self._neighbours(best, untried)):
            return Proposal(nearby[0], "refine")
        return Proposal(self._sample(untried), "sample")

    def _is_open(self, settings: Settings) -> bool:
        """Test that it was not tried and may fit, as far as is known."""
        return settings not in self.results and not any(needs_at_least(settings, other) for other in self._too_large)

    def _neighbours(self, best: Settings, untried: Sequence[Settings]) -> list[Settings]:
        """Configurations one step from the best, then one step from it with the next larger budget, fit or not."""
        larger = [tokens for tokens in self.space.budgets if tokens > best.tokens]
        bases = [best, *(replace(best, tokens=tokens) for tokens in larger[:1])]
        nearby = [step for base in bases for step in self.space.steps(base)]
        return [settings for settings in nearby if settings in untried]

    def _sample(self, untried: Sequence[Settings]) -> Settings:
        """The configuration nearest to what Optuna suggests, as it does not know which combinations are valid."""
        trial = self._study.ask(self._distributions)
        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)  # the one measured is added by tell
        values = {name: self.space.values[name][place] for name, place in trial.params.items()}
        return self.space.nearest(replace(self.space.default, **values), untried)

    def _again(self) -> Proposal | None:
        """The fastest once more: of many speeds with noise the highest is too high, and it may fail."""
        repeats = sum(len(trials) - 1 for trials in self.results.values())
        best = self.best()
        if best is None or len(self.results[best]) > 1 or repeats >= self._search.search.repeats:
            return None
        return Proposal(best, CONFIRM)


def most_trials(search: SearchSection, size: int) -> int:
    """Return how many configurations of a space of this size to measure."""
    if search.max_trials is not None:
        return min(search.max_trials, size)
    return size if search.algorithm == "grid" else min(size, max(LEAST_TRIALS, size // 5))


def _sampler(search: SearchSection) -> optuna.samplers.BaseSampler:
    if search.algorithm == "random":
        return optuna.samplers.RandomSampler(seed=search.seed)
    return optuna.samplers.TPESampler(seed=search.seed, n_startup_trials=STARTUP_TRIALS, multivariate=True)


def _distribution(space: SearchSpace, name: str) -> optuna.distributions.BaseDistribution:
    """Over the places of the values, so that their order is known to Optuna where they have one."""
    last = len(space.values[name]) - 1
    if name in ORDERED and None not in space.values[name]:
        return optuna.distributions.IntDistribution(0, last)
    return optuna.distributions.CategoricalDistribution(tuple(range(last + 1)))
