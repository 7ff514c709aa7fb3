"""The trials of a search as its report, best.yaml and the terminal see them: one record a configuration.

In: the journal. Out: records like the lines of trials.jsonl, in which all trials of a configuration stand together: its
speed is the mean of theirs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tuning.journal import Trial, TrialJournal, was_measured
from tuning.search import together
from tuning.settings import Settings
from tuning.tune_trials import Trial as SeenTrial
from tuning.tune_trials import read_trials


def trial_records(journal: TrialJournal) -> list[dict[str, Any]]:
    """A record of each configuration, in the order in which they were last tried."""
    trials: dict[Settings, list[Trial]] = {}
    for trial in journal.trials:
        earlier = trials.pop(trial.settings, [])
        trials[trial.settings] = [*(was for was in earlier if was_measured(was.measurement)), trial]
    return [
        replace(those[-1], measurement=together([t.measurement for t in those])).record() for those in trials.values()
    ]


def seen_trials(journal: TrialJournal) -> list[SeenTrial]:
    """The records, read."""
    return read_trials(trial_records(journal))
