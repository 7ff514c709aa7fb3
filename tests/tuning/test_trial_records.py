"""What a report sees of a journal: one record a configuration, with the mean of its trials."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import tiny_config
from train_config.tune_schema import TuneConfig
from training.launch.placement import NodeResources
from tuning.journal import TrialJournal
from tuning.settings import Measurement
from tuning.space import SearchSpace, make_space
from tuning.trial_records import seen_trials


@pytest.fixture
def space(tmp_path: Path) -> SearchSpace:
    nodes = [NodeResources(8, 0)]
    return make_space(tiny_config(tmp_path), TuneConfig.model_validate({}), nodes)


@pytest.fixture
def journal(tmp_path: Path) -> TrialJournal:
    return TrialJournal(tmp_path / "trials.jsonl")


def ok(speed: float) -> Measurement:
    return Measurement("ok", "", speed, [speed, 1.1 * speed], peak_memory_bytes=1, total_memory_bytes=9, seconds=5.0)


def test_trials_of_one_configuration_stand_together_where_the_last_of_them_stood(journal, space):
    own, other = space.settings[:2]
    for settings, speed in ((own, 100.0), (other, 90.0), (own, 80.0)):
        journal.add(settings, ok(speed), "bracket")
    first, second = seen_trials(journal)
    assert (first.number, first.tokens_per_s, len(first.windows)) == (2, 90.0, 2)
    assert (second.number, second.tokens_per_s, len(second.windows), second.seconds) == (3, 90.0, 4, 10.0)
    assert len(journal.trials) == 3


def test_what_was_concluded_and_then_measured_is_as_it_was_measured(journal, space):
    journal.add(space.default, Measurement("pruned", "needs more than what did not fit"), "refine")
    journal.add(space.default, ok(100.0), "refine")
    (seen,) = seen_trials(journal)
    assert (seen.status, seen.tokens_per_s) == ("ok", 100.0)
