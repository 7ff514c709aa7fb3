"""``esmeray profile log`` writes a plot and a diagnosis, or names the missing columns in one line."""

import json

import pytest

from tests.monitoring import gpu_traces


def test_summary_is_printed_drawn_and_written_with_what_to_do(command, tmp_path):
    log = gpu_traces.thermal().write(tmp_path / "log.csv")
    outcome = command.done("profile", "log", log, "--profile.json_output", tmp_path / "found.json")
    assert "% while busy, idle " in outcome.out
    assert "  heat: " in outcome.out and "to do: " in outcome.out
    (gpu,) = json.loads((tmp_path / "found.json").read_text())["gpus"]
    assert gpu["thermal"] == pytest.approx(0.5, abs=0.01)
    assert len(gpu["spans_s"]["thermal"]) == 1
    assert gpu["advice"][0]["topic"] == "heat" and gpu["advice"][0]["actions"]
    assert (tmp_path / "log.png").exists()


def test_log_is_not_overwritten(command, tmp_path):
    log = gpu_traces.thermal().write(tmp_path / "log.csv")
    before = log.read_bytes()
    for option in ("--profile.output", "--profile.json_output"):
        command.refused(2, "is the log itself", "profile", "log", log, option, log)
    assert log.read_bytes() == before
