from dataclasses import replace

import pytest

from common.errors import DataError
from tuning.journal import TrialJournal
from tuning.settings import Measurement, Settings

SETTINGS = Settings(512, None, 1, 4, "bf16", False, False, 2, 1)
OK = Measurement("ok", "", tokens_per_s=10.0, windows=[9.9, 10.0], peak_memory_bytes=5, shares={"forward": 0.5})


def test_trials_come_back_without_the_line_of_a_killed_process(tmp_path):
    path = tmp_path / "trials.jsonl"
    journal = TrialJournal(path)
    journal.add(SETTINGS, OK, "bracket")
    journal.add(replace(SETTINGS, tokens=1024), Measurement("out_of_memory", "out of memory"), "bracket")
    with path.open("a") as file:
        file.write('{"trial":3,"sett')
    again = TrialJournal(path)
    assert again.trials == journal.trials
    again.add(SETTINGS, OK, "confirm")
    assert [trial.trial for trial in TrialJournal(path).trials] == [1, 2, 3]


@pytest.mark.parametrize("line", ["no json", "{}", '{"trial":1,"settings":{"tokens":3},"measurement":{}}'])
def test_line_that_is_no_trial_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "trials.jsonl"
    TrialJournal(path).add(SETTINGS, OK, "bracket")
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"trials\.jsonl, line 2: not a trial of this version"):
        TrialJournal(path)
