"""What a report sees of a journal: one record a configuration, with an estimate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import tiny_config
from train_config.tune_schema import TuneConfig
from training.placement import NodeResources
from training.search_space import SearchSpace, make_space
from training.throughput import Measurement
from training.trial_journal import TrialJournal
from training.trial_records import seen_trials, trial_records


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
    first, second = seen_trials(journal, space)
    assert (first.number, first.tokens_per_s, len(first.windows)) == (2, 90.0, 2)
    assert (second.number, second.tokens_per_s, len(second.windows), second.seconds) == (3, 90.0, 4, 10.0)
    assert len(journal.trials) == 3


def test_estimates_take_the_changes_of_the_machine_out(journal, space):
    own, other = space.settings[:2]
    for settings, speed in ((own, 100.0), (own, 70.0), (other, 75.0), (own, 71.0)):
        journal.add(settings, ok(speed), "bracket")
    estimates = {trial.number: trial.estimate for trial in seen_trials(journal, space)}
    assert estimates[3] > estimates[4], "beside 70 and 71 it was 75, though the mean of the other one is higher"


def test_what_was_concluded_and_then_measured_is_as_it_was_measured(journal, space):
    journal.add(space.default, Measurement("pruned", "needs more than what did not fit"), "refine")
    journal.add(space.default, ok(100.0), "refine")
    (seen,) = seen_trials(journal, space)
    assert (seen.status, seen.tokens_per_s) == ("ok", 100.0)


def test_configuration_of_an_earlier_space_has_no_estimate(journal, space):
    journal.add(space.default, ok(100.0), "bracket")
    journal.add(replace(space.default, tokens=123_456), ok(200.0), "bracket")
    assert [record["estimate"] is None for record in trial_records(journal, space)] == [False, True]


def test_no_estimate_where_nothing_was_measured(journal, space):
    journal.add(space.default, Measurement("crash", "it died"), "bracket")
    assert [record["estimate"] for record in trial_records(journal, space)] == [None]
