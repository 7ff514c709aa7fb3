"""The trials of a search as its report, best.yaml and the terminal see them: one record a configuration.

In: the journal and the space. Out: records like the lines of trials.jsonl, in which all trials of a configuration stand
together, with an ``estimate`` of its speed that takes the machine's own changes out (:mod:`training.speed_model`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from monitoring.tune_trials import Trial as SeenTrial
from monitoring.tune_trials import read_trials
from training.search_knowledge import together
from training.search_space import SearchSpace
from training.speed_model import SpeedModel
from training.throughput import Settings
from training.trial_journal import Trial, TrialJournal, was_measured


def trial_records(journal: TrialJournal, space: SearchSpace) -> list[dict[str, Any]]:
    """A record of each configuration, in the order in which they were last tried."""
    trials: dict[Settings, list[Trial]] = {}
    model = SpeedModel(space.values)
    for trial in journal.trials:
        earlier = trials.pop(trial.settings, [])
        trials[trial.settings] = [*(was for was in earlier if was_measured(was.measurement)), trial]
        if trial.settings in space:  # the space may have been another one when it was tried
            model.learn(trial.settings, trial.measurement)
    last = [replace(those[-1], measurement=together([t.measurement for t in those])) for those in trials.values()]
    estimates = _estimates(model, [trial.settings for trial in last if trial.settings in space])
    return [trial.record() | {"estimate": estimates.get(trial.settings)} for trial in last]


def seen_trials(journal: TrialJournal, space: SearchSpace) -> list[SeenTrial]:
    """The records, read."""
    return read_trials(trial_records(journal, space))


def _estimates(model: SpeedModel, configurations: list[Settings]) -> dict[Settings, float]:
    if not configurations or not model.knows_any():
        return {}
    return dict(zip(configurations, model.tokens_per_s(configurations), strict=True))
