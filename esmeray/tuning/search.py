"""Choose the next configuration to measure, and record each trial in Optuna's storage, from which a search resumes.

The search starts with the experiment's own configuration, and finds its largest token budget by doubling and bisecting.
Then it measures the valid, untried configuration nearest to the fastest so far, later to a suggestion of Optuna's TPE.
Configurations that need at least the memory of one that was too large are left out.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from esmeray.common.errors import DataError
from esmeray.tuning.records import NAMES, Measurement, Settings, Trial
from esmeray.tuning.section import TuneConfig
from esmeray.tuning.space import SearchSpace, most_trials, needs_at_least

STARTUP_TRIALS = 14
"""Results before the first suggestion of TPE; with fewer its suggestions are worse than neighbours of the fastest."""

STUDY = "search"
METRIC = "tokens_per_s"
MEASUREMENT = "measurement"
"""Attribute of a trial of the study: its :class:`~esmeray.tuning.records.Measurement`."""

_PRECISIONS = ("bf16", "fp32", "fp16")
"""All values, since Optuna refuses other choices when a search resumes with another space."""


class Search(OptunaSearch):
    """Ray Tune's Optuna searcher, for a space in which only some combinations are valid.

    Its study is in the file ``trials``. A trial of the study has the settings that were measured.
    """

    _ot_study: Any

    def __init__(self, space: SearchSpace, search: TuneConfig, trials: Path) -> None:
        self._configurations, self._options, self._margin = space, search.search, search.memory_margin
        distributions: dict[str, BaseDistribution] = {name: _distribution(name, space.values[name]) for name in NAMES}
        sampler = _Sampler(distributions, self._choose)
        super().__init__(
            distributions, METRIC, "max", sampler=sampler, study_name=STUDY, storage=_open_storage(trials, repair=True)
        )
        for trial in self._ot_study.get_trials(states=[TrialState.RUNNING]):  # of a search that was killed
            self._ot_study.tell(trial.number, state=TrialState.FAIL)

    def suggest(self, trial_id: str) -> Any:
        """Return the settings of the next trial; FINISHED at the end."""
        if not self._untried() or self._is_over():
            return Searcher.FINISHED
        super().suggest(trial_id)
        return {"settings": asdict(_settings_of(self._ot_trials[trial_id].params))}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Record a trial; it is on disk when this returns. One that ended without a measurement can be tried again."""
        if result and MEASUREMENT in result:
            self._ot_trials[trial_id].set_user_attr(MEASUREMENT, json.loads(result[MEASUREMENT]))
        super().on_trial_complete(trial_id, result, error)

    @property
    def _measurements(self) -> dict[Settings, Measurement]:
        return {trial.settings: trial.measurement for trial in _ended(self._ot_study)}

    def _running(self) -> set[Settings]:
        # The trial that is being chosen has no settings yet.
        running = self._ot_study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
        return {_settings_of(trial.params) for trial in running if trial.params}

    def _is_over(self) -> bool:
        # Only measuring time counts: a search that was stopped for the night keeps the rest of its time budget.
        measurements = self._measurements
        seconds = sum(measurement.seconds for measurement in measurements.values())
        out_of_time = self._options.time_budget_s is not None and seconds >= self._options.time_budget_s
        tried = len(measurements.keys() | self._running())
        return out_of_time or tried >= most_trials(self._options, len(self._configurations))

    def _choose(self, suggestion: Settings | None) -> Settings:
        """Return the valid configuration to measure; without a suggestion one next to the fastest so far."""
        untried = self._untried()
        if bracket := self._bracket(untried):
            return bracket
        measurements = self._measurements
        fastest = max(measurements, key=lambda settings: measurements[settings].speed(self._margin), default=None)
        return self._configurations.nearest(suggestion or fastest or self._configurations.default, untried)

    def _untried(self) -> list[Settings]:
        """Return untried configurations that may fit, given the measurements so far."""
        measurements = self._measurements
        tried = measurements.keys() | self._running()
        too_large = [settings for settings, result in measurements.items() if result.is_too_large(self._margin)]
        return [
            settings
            for settings in self._configurations.settings
            if settings not in tried
            and not any(needs_at_least(settings, other) for other in too_large)
            and not _is_expected_too_large(settings, measurements)
        ]

    def _bracket(self, untried: Sequence[Settings]) -> Settings | None:
        """Return the next step of finding the own settings' largest budget; None while one runs, or once it is
        known."""
        own = self._configurations.default
        if own in untried:
            return own
        ladder = self._configurations.ladder(own)
        measurements, running = self._measurements, self._running()
        fitting = [s.tokens for s in ladder if s in measurements and measurements[s].fits(self._margin)]
        # Budgets that were ruled out without a measurement count as too large; running ones are still unknown.
        ended = [s.tokens for s in ladder if s not in untried and s not in running]
        tokens = next_budget([s.tokens for s in ladder], fitting, [t for t in ended if t not in fitting])
        proposal = replace(own, tokens=tokens or own.tokens)
        return proposal if proposal in untried else None


class _Sampler(optuna.samplers.TPESampler):
    """TPE whose suggestions are replaced by the configuration that ``choose`` returns for them."""

    def __init__(
        self, distributions: dict[str, BaseDistribution], choose: Callable[[Settings | None], Settings]
    ) -> None:
        # Constant liar: parallel trials must not get the same suggestion.
        super().__init__(seed=0, n_startup_trials=STARTUP_TRIALS, multivariate=True, constant_liar=True)
        self._distributions, self._choose = distributions, choose

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._distributions

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        params = super().sample_relative(study, trial, search_space)
        settings = self._choose(_settings_of(params) if params else None)
        return asdict(settings) | {"batch_size": settings.batch_size or 0}


def read_trials(path: Path) -> list[Trial]:
    """Return the trials of a search in the order they ended. Raises DataError if the file can't be read."""
    if not path.exists() or path.stat().st_size == 0:  # Optuna creates the file before the study
        return []
    try:
        return _ended(optuna.load_study(study_name=STUDY, storage=_open_storage(path)))
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not trials of this version ({error!r}); choose another --tune.name") from error


def next_budget(budgets: Sequence[int], fitting: Sequence[int], too_large: Sequence[int]) -> int | None:
    """Return the budget to try next by doubling, then by bisecting; None once the largest that fits is known."""
    largest = max(fitting, default=0)
    least = min((tokens for tokens in too_large if tokens > largest), default=math.inf)
    between = [tokens for tokens in budgets if largest < tokens < least]
    if not between:
        return None
    if least == math.inf:
        return max((tokens for tokens in between if tokens <= 2 * largest), default=between[0])
    return between[(len(between) - 1) // 2]


def _is_expected_too_large(settings: Settings, measurements: dict[Settings, Measurement]) -> bool:
    """Extrapolate the memory from the two largest measured budgets with all other settings equal.

    On a CPU, a trial that runs out of memory could take memory from other programs.
    """
    alike = [
        (other.tokens, result.peak_memory_bytes, result.total_memory_bytes)
        for other, result in measurements.items()
        if result.peak_memory_bytes and result.total_memory_bytes and result.status == "ok"
        if replace(other, tokens=settings.tokens) == settings
    ]
    if len(alike) < 2:
        return False
    (low, low_bytes, _), (high, high_bytes, total_bytes) = sorted(alike)[-2:]
    token_bytes = max(0, high_bytes - low_bytes) / (high - low)
    return high_bytes + token_bytes * (settings.tokens - high) > total_bytes


def _open_storage(path: Path, repair: bool = False) -> JournalStorage:
    """Open Optuna's journal. ``repair``: remove its lock and an incomplete last line, which a kill or a full disk may
    leave."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if repair and path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
        Path(f"{path}.lock").unlink(missing_ok=True)
    return JournalStorage(JournalFileBackend(str(path)))


def _ended(study: optuna.Study) -> list[Trial]:
    # Failures are complete as well, with a speed of 0, so that the sampler avoids them.
    complete = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    in_order = sorted(complete, key=attrgetter("datetime_complete"))
    return [
        Trial(number, _settings_of(trial.params), Measurement(**trial.user_attrs[MEASUREMENT]))
        for number, trial in enumerate(in_order, start=1)
    ]


def _settings_of(params: dict[str, Any]) -> Settings:
    # No limit of sequences in a batch is 0 in the study.
    return Settings(**params | {"batch_size": params["batch_size"] or None})


def _distribution(name: str, values: Sequence[Any]) -> BaseDistribution:
    if name == "precision":
        return CategoricalDistribution(_PRECISIONS)
    numbers = [value or 0 for value in values]
    return IntDistribution(min(numbers), max(numbers), log=name == "tokens")
