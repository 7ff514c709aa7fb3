"""Which configuration a throughput search measures next: a searcher of Ray Tune around Optuna's.

In: a space, the settings of the search, what was measured before. Out: one configuration at a time, until the trials
are used up. The order of the default algorithm:

1. bracket: from the experiment's own budget, by doubling and bisecting, the largest budget that fits;
2. refine: what promises most to be faster than the fastest, by a model of what settings do and of the machine's own
   changes (:mod:`tuning.speed_model`); where that is something which was measured before, it or the fastest is once
   more (confirm), whichever was measured less often;
3. sample: where the model promises nothing any more, Optuna's TPE for the rest, and after each what is promising then;
4. confirm: what may still be the fastest once more, and the fastest itself in any case.

Nothing is measured that needs at least the memory of what did not fit, or has a value with which every trial hung: it
is answered ``pruned``. A search that goes on asks the same questions again and takes the answers from its journal, so
it ends as if it had never stopped.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import optuna
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from train_config.tune_schema import SearchSection, TuneConfig
from tuning.knowledge import Knowledge
from tuning.settings import Measurement, Settings
from tuning.space import ORDERED, SearchSpace, Value
from tuning.speed_model import SpeedModel

METRIC = "tokens_per_s"
LEAST_TRIALS = 12
GAIN = 1e-3
"""Expected gain, as a share of the speed, under which nothing is promising."""

WINDOWS = 2
"""Of a trial, at the most, unless all is measured once and in full. A machine that changes its speed does so for longer
than a trial takes: what matters is better measured again later than longer."""

STARTUP_TRIALS = 6
"""Results that Optuna's TPE wants before it models; before that it samples by chance."""

REPEATS = 20
"""Known configurations that Optuna may suggest in a row before one that is still open is taken by chance."""

FAULTS = frozenset({"crash", "timeout", "nan"})
"""What says nothing of speed or memory. Such trials are not counted, as long as they are fewer than those that are."""

MOST_BROKEN_OFF = 3
"""Trials in a row that may end without any result, not even a failure, before the search gives up."""

CONFIRM = "confirm"
"""The phase of what is measured once more."""

Learn = Callable[[Settings, Measurement, str], None]


class Proposal(NamedTuple):
    """What to measure next, and in which phase of the search."""

    settings: Settings
    phase: str


class ThroughputSearch(Searcher):
    """One configuration at a time for Ray Tune, which must not run two at once.

    A trial's config is ``{"settings": ..., "best_tokens_per_s": ..., "max_windows": ...}``; its last result holds
    ``measurement`` as JSON, since Ray Tune flattens what is nested.

    Args:
        space: the configurations.
        search: algorithm, trials, margin.
        earlier: what an earlier attempt measured, of each configuration in the order in which that was learned; it is
            not asked for again.
        learned: called with every new result, as it was measured, before the next configuration is chosen.
    """

    def __init__(
        self,
        space: SearchSpace,
        search: TuneConfig,
        earlier: Mapping[Settings, Sequence[Measurement]] | None = None,
        learned: Learn | None = None,
    ) -> None:
        super().__init__(metric=METRIC, mode="max")
        self.space = space
        self.model = SpeedModel(space.values)
        self.knowledge = Knowledge(search.memory_margin, space.shares_memory)
        self.max_trials = most_trials(search.search, len(space))
        self.trials = 0
        """Configurations that were measured, by this attempt or an earlier one, less those of :data:`FAULTS`."""
        self.repeats = 0
        """Trials of what was measured before."""
        self.faults = 0
        self.measuring: Proposal | None = None
        self.stopped = False
        self.broken_off = 0
        """Trials in a row, up to the last, that ended without a result: a fault of the machinery around the pool."""
        self._search = search
        self._earlier = {settings: list(measurements) for settings, measurements in (earlier or {}).items()}
        self._learned = learned or (lambda *_: None)
        self._seconds = 0.0
        self._sampler = _Sampler(space, search.search, self.knowledge)
        self._plan = self._make_plan()

    def suggest(self, trial_id: str) -> Any:
        """The next configuration, or ``Searcher.FINISHED``. Answers from before are taken up on the way."""
        while not self._is_over() and (proposal := next(self._plan, None)) is not None:
            if not (earlier := self._earlier.get(proposal.settings)):
                self.measuring = proposal
                return {
                    "settings": asdict(proposal.settings),
                    "best_tokens_per_s": self._to_beat(proposal),
                    "max_windows": self._most_windows(),
                }
            self._take(proposal, earlier.pop(0))
        return Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Take up the result of the configuration that was suggested last."""
        proposal, self.measuring = self.measuring, None
        if proposal is None or self.stopped:  # an interrupted trial says nothing
            return
        if result is None or "measurement" not in result:
            self.broken_off += 1  # not for the journal: the next attempt asks again
            if proposal.phase != CONFIRM:
                self._take(proposal, Measurement("crash", "the trial broke off"))
            return
        self.broken_off = 0
        measurement = Measurement(**json.loads(result["measurement"]))
        self._take(proposal, measurement)
        self._learned(proposal.settings, measurement, proposal.phase)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Windows are not waited for: a trial ends itself when it can't win."""

    def stop(self) -> None:
        """Suggest nothing any more, and take no result up."""
        self.stopped = True

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the journal has it all."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing; see :meth:`save`."""

    def __getstate__(self) -> dict[str, Any]:
        """Ray Tune pickles searchers so as to restore them, which is not done here; a plan can't be pickled."""
        return {}

    def _is_over(self) -> bool:
        budget_s = self._search.search.time_budget_s
        if self.stopped or self.broken_off >= MOST_BROKEN_OFF:
            return True
        return budget_s is not None and self._seconds >= budget_s

    def _to_beat(self, proposal: Proposal) -> float | None:
        """The speed below which the configuration need not be measured to the end."""
        if proposal.phase == CONFIRM or self._search.search.algorithm == "grid":
            return None
        best = self.knowledge.best()
        return None if best is None else self.knowledge.speed(best)

    def _most_windows(self) -> int:
        most = self._search.measurement.max_windows
        return most if self._search.search.algorithm == "grid" else min(WINDOWS, most)

    def _take(self, proposal: Proposal, measurement: Measurement) -> None:
        self._seconds += measurement.seconds
        self.knowledge.learn(proposal.settings, measurement)
        self.model.learn(proposal.settings, measurement)
        if proposal.phase == CONFIRM:
            return
        if measurement.status in FAULTS and self.faults < self.max_trials:
            self.faults += 1
            self.trials -= 1
        self._sampler.learn(proposal.settings)

    def _make_plan(self) -> Iterator[Proposal]:
        exploring = self._explore()
        while self.trials < self.max_trials and (proposal := next(exploring, None)) is not None:
            self._count(proposal)
            yield proposal
        for proposal in self._confirm():
            self._count(proposal)
            yield proposal

    def _count(self, proposal: Proposal) -> None:
        if proposal.phase == CONFIRM:
            self.repeats += 1
        else:
            self.trials += 1

    def _explore(self) -> Iterator[Proposal]:
        algorithm = self._search.search.algorithm
        if algorithm == "grid":
            for settings in self.space.settings:
                yield from self._try(settings, "grid")
            return
        yield from self._bracket()
        if algorithm == "tpe":
            yield from self._refine()
        yield from self._sample(refines=algorithm == "tpe")

    def _try(self, settings: Settings, phase: str) -> Iterator[Proposal]:
        """Propose a configuration, unless its answer is known or follows from others."""
        if settings in self.knowledge.measurements:
            return
        reason = None if phase == "grid" else self.knowledge.known_to_hang(settings)
        if (smaller := self.knowledge.known_not_to_fit(settings)) is not None:
            reason = f"needs at least the memory of {difference(smaller, settings)}, which did not fit"
        if reason is None:
            yield Proposal(settings, phase)
            return
        measurement = Measurement("pruned", reason)
        self.knowledge.learn(settings, measurement)
        self._sampler.learn(settings)
        self._learned(settings, measurement, phase)

    def _bracket(self) -> Iterator[Proposal]:
        """Find the largest budget that fits the experiment's other settings."""
        ladder = self.space.ladder(self.space.default)
        at, largest_fit, smallest_miss = ladder.index(self.space.default), -1, len(ladder)
        while smallest_miss - largest_fit > 1:
            yield from self._try(ladder[at], "bracket")
            if self.knowledge.fits(ladder[at]):
                largest_fit = at
            else:
                smallest_miss = at
            if smallest_miss == len(ladder):
                at = _doubled(ladder, largest_fit)
            elif largest_fit < 0:
                at = _halved(ladder, smallest_miss)
            else:
                at = (largest_fit + smallest_miss) // 2
        if self.knowledge.best() is None:  # the one that needs least: if not this, then none
            yield from self._try(self.space.settings[0], "bracket")

    def _refine(self) -> Iterator[Proposal]:
        """What is the most promising, until nothing is."""
        while (proposal := self._most_promising(self._untried())) is not None:
            if proposal.phase == CONFIRM:
                yield proposal
            else:
                yield from self._try(*proposal)

    def _untried(self) -> list[Settings]:
        """What may fit, as far as is known."""
        known = self.knowledge
        return [s for s in self.space.settings if s not in known.measurements and known.known_not_to_fit(s) is None]

    def _most_promising(self, untried: Sequence[Settings]) -> Proposal | None:
        """By how much it is expected to be faster than the fastest, if at all; None where nothing is worth a trial."""
        best = self.knowledge.best()
        if best is None:
            return None
        again = [s for s in self.knowledge.measurements if s != best and self.knowledge.fits(s)]
        rivals = [*untried, *(again if self._may_repeat() else [])]
        if not rivals:
            return None
        chances = [self.knowledge.chance_to_fit(rival) for rival in rivals]
        gains = [gain * chance for gain, chance in zip(self.model.gains(best, rivals), chances, strict=True)]
        place = max(range(len(rivals)), key=gains.__getitem__)
        if gains[place] < GAIN:
            return None
        if place < len(untried):
            return Proposal(rivals[place], "refine")
        trials = self.knowledge.trials
        return Proposal(min(best, rivals[place], key=lambda s: len(trials[s])), CONFIRM)

    def _may_repeat(self) -> bool:
        return self.repeats < self._search.search.repeats

    def _sample(self, refines: bool) -> Iterator[Proposal]:
        """What Optuna suggests, as long as something is open."""
        while (settings := self._sampler.suggest()) is not None:
            yield from self._try(settings, "sample")
            if refines:
                yield from self._refine()

    def _confirm(self) -> Iterator[Proposal]:
        """Measure what may be the fastest once more, and what is named as the fastest in any case.

        Of many figures with noise the largest is too large, and what failed once in two trials is no good answer.
        """
        if sum(map(self.knowledge.fits, self.knowledge.measurements)) < 2:
            return
        while self._may_repeat() and (best := self.knowledge.best()) is not None:
            if (proposal := self._most_promising(untried=())) is not None:
                yield proposal
            elif len(self.knowledge.trials[best]) < 2:
                yield Proposal(best, CONFIRM)
            else:
                return


def most_trials(search: SearchSection, size: int) -> int:
    """Configurations of a space of this size to measure."""
    if search.max_trials is not None:
        return min(search.max_trials, size)
    return size if search.algorithm == "grid" else min(size, max(LEAST_TRIALS, size // 5))


def difference(one: Settings, other: Settings) -> str:
    """What ``one`` has that ``other`` has not, as ``tokens 4096, compile True``."""
    mine, theirs = asdict(one), asdict(other)
    return ", ".join(f"{name} {value}" for name, value in mine.items() if value != theirs[name]) or "the same"


def _doubled(ladder: list[Settings], at: int) -> int:
    """The rung with the largest budget up to twice as large, at least the next."""
    within = [i for i, rung in enumerate(ladder) if rung.tokens <= 2 * ladder[at].tokens]
    return max(at + 1, within[-1])


def _halved(ladder: list[Settings], at: int) -> int:
    """The rung with the smallest budget down to half as large, at most the one before."""
    within = [i for i, rung in enumerate(ladder) if 2 * rung.tokens >= ladder[at].tokens]
    return min(at - 1, within[0])


class _Sampler:
    """Optuna by way of Ray Tune's wrapper, which knows nothing of combinations that can't be."""

    def __init__(self, space: SearchSpace, search: SearchSection, knowledge: Knowledge) -> None:
        self._space, self._knowledge = space, knowledge
        self._random = random.Random(search.seed)
        self._distributions = {name: _distribution(name, space.values[name]) for name in space.varied}
        self._asked: dict[Settings, str] = {}
        self._count = 0
        self._optuna: OptunaSearch | None = None
        if self._distributions:
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            sampler: optuna.samplers.BaseSampler = (
                optuna.samplers.RandomSampler(seed=search.seed)
                if search.algorithm == "random"
                else optuna.samplers.TPESampler(seed=search.seed, n_startup_trials=STARTUP_TRIALS)
            )
            self._optuna = OptunaSearch(space=self._distributions, metric=METRIC, mode="max", sampler=sampler)

    def suggest(self) -> Settings | None:
        """A configuration of which nothing is known yet; None when there is none."""
        still_open = [settings for settings in self._space.settings if settings not in self._knowledge.measurements]
        if not still_open or self._optuna is None:
            return still_open[0] if still_open else None
        for _ in range(REPEATS):
            self._count += 1
            trial_id = str(self._count)
            settings = self._settings(self._optuna.suggest(trial_id) or {})
            if settings in self._space and settings not in self._knowledge.measurements:
                self._asked[settings] = trial_id
                return settings
            self._optuna.on_trial_complete(trial_id, error=True)  # leaves Optuna's picture of the space as it is
        return self._random.choice(still_open)

    def learn(self, settings: Settings) -> None:
        """Tell Optuna a result, whoever chose the configuration. What does not fit has no speed."""
        if self._optuna is None:
            return
        speed = self._knowledge.speed(settings)
        trial_id = self._asked.pop(settings, None)
        if trial_id is not None:
            self._optuna.on_trial_complete(trial_id, {METRIC: speed})
        else:
            self._optuna.add_evaluated_point(self._places(settings), speed)

    def _settings(self, places: Mapping[str, int]) -> Settings:
        chosen = {name: self._space.values[name][place] for name, place in places.items()}
        return replace(self._space.default, **chosen)  # type: ignore[arg-type]

    def _places(self, settings: Settings) -> dict[str, int]:
        return {name: self._space.values[name].index(getattr(settings, name)) for name in self._distributions}


def _distribution(name: str, values: tuple[Value, ...]) -> optuna.distributions.BaseDistribution:
    """Over the places of the values: their order is known to Optuna where they have one."""
    last = len(values) - 1
    if name in ORDERED and None not in values:
        return optuna.distributions.IntDistribution(0, last)
    return optuna.distributions.CategoricalDistribution(tuple(range(last + 1)))
