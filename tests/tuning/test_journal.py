import json
import math
from dataclasses import replace

import pytest

from common.errors import DataError
from tuning.journal import TrialJournal
from tuning.settings import Measurement, Settings

SETTINGS = Settings(512, None, 1, 4, "bf16", False, False, 2, 1)
OK = Measurement("ok", "", tokens_per_s=10.0, windows=[9.9, 10.0], peak_memory_bytes=5, shares={"forward": 0.5})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trials.jsonl"


def test_trials_come_back_as_they_were_written(path):
    journal = TrialJournal(path)
    journal.add(SETTINGS, OK, "bracket")
    journal.add(replace(SETTINGS, tokens=1024), Measurement("out_of_memory", "out of memory"), "bracket")
    again = TrialJournal(path)
    assert again.trials == journal.trials
    assert [trial.number for trial in again.trials] == [1, 2]
    assert json.loads(path.read_text().splitlines()[0])["settings"]["tokens"] == 512


def test_configuration_that_was_measured_twice_has_both_in_their_order(path):
    journal = TrialJournal(path)
    journal.add(SETTINGS, OK, "refine")
    journal.add(replace(SETTINGS, tokens=64), OK, "refine")
    both = replace(OK, tokens_per_s=11.0, windows=[9.9, 10.0, 12.0])
    journal.add(SETTINGS, both, "confirm")
    assert TrialJournal(path).measured() == {SETTINGS: [OK, both], replace(SETTINGS, tokens=64): [OK]}


def test_line_of_a_killed_process_is_dropped_and_the_next_is_whole(path):
    TrialJournal(path).add(SETTINGS, OK, "bracket")
    with path.open("a") as file:
        file.write('{"trial":2,"sett')
    journal = TrialJournal(path)
    assert len(journal.trials) == 1
    journal.add(replace(SETTINGS, tokens=64), OK, "sample")
    assert [trial.settings.tokens for trial in TrialJournal(path).trials] == [512, 64]


def test_windows_that_were_no_number_are_valid_json_and_come_back(path):
    TrialJournal(path).add(SETTINGS, replace(OK, status="nan", windows=[math.nan]), "sample")
    assert "NaN" not in path.read_text()
    assert math.isnan(TrialJournal(path).trials[0].measurement.windows[0])


@pytest.mark.parametrize("line", ["no json", "{}", '{"trial":1,"settings":{"tokens":3},"measurement":{}}'])
def test_line_that_is_no_trial_is_refused_with_its_number(path, line):
    TrialJournal(path).add(SETTINGS, OK, "bracket")
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"trials\.jsonl, line 2: not a trial of this version"):
        TrialJournal(path)
