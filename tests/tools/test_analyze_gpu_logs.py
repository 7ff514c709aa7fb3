"""``python -m tools analyze_gpu_logs``: a picture and a diagnosis, or one line that names what the log lacks."""

from __future__ import annotations

import json

import matplotlib.image
import pytest

from tests.monitoring import gpu_traces
from tests.monitoring.gpu_traces import TRACES


@pytest.mark.parametrize("name", ["healthy", "thermal"])
def test_summary_is_printed_with_what_to_do(command, tmp_path, name):
    make, expected = TRACES[name]
    log = make(0).write(tmp_path / "log.csv")
    outcome = command("analyze_gpu_logs", "--log", log, "--output", tmp_path / "picture.png")
    assert outcome.code == 0, outcome.err
    assert "% at work, idle " in outcome.out
    for topic in expected:
        assert f"  {topic}: " in outcome.out
    assert ("to do: " in outcome.out) == bool(expected)
    assert ("nothing is amiss" in outcome.out) == (not expected)
    height, width, _ = matplotlib.image.imread(tmp_path / "picture.png").shape
    assert width > 1000
    assert height > 600


def test_json_holds_everything(command, tmp_path):
    log = gpu_traces.thermal().write(tmp_path / "log.csv")
    outcome = command("analyze_gpu_logs", "--log", log, "--json", tmp_path / "found.json")
    assert outcome.code == 0, outcome.err
    (gpu,) = json.loads((tmp_path / "found.json").read_text())["gpus"]
    assert gpu["thermal"] == pytest.approx(0.5, abs=0.01)
    assert len(gpu["spans_s"]["thermal"]) == 1
    assert gpu["advice"][0]["topic"] == "heat" and gpu["advice"][0]["actions"]
    assert (tmp_path / "log.png").exists()


def test_missing_columns_are_one_line_and_nothing_is_written(command, tmp_path):
    log = tmp_path / "log.csv"
    log.write_text(
        "time,gpu,gpu_util,mem_used_bytes,mem_total_bytes,temperature_c,power_w,sm_clock_mhz\n" + "1," * 7 + "1\n"
    )
    outcome = command("analyze_gpu_logs", "--log", log)
    assert outcome.code == 3
    assert outcome.err.count("\n") == 1
    assert "no column for util_percent or utilization.gpu (nearest: gpu_util)" in outcome.err
    assert "The log has: time, gpu, gpu_util, mem_used_bytes" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_log_is_said_to_be_empty(command, tmp_path, content):
    (tmp_path / "log.csv").write_text(content)
    outcome = command("analyze_gpu_logs", "--log", tmp_path / "log.csv")
    assert (outcome.code, outcome.err) == (3, f"error: {tmp_path / 'log.csv'}: is empty\n")


@pytest.mark.parametrize("given", [".", "monitoring", "monitoring/worker-00000.jsonl"])
def test_samples_of_a_run_belong_to_watch(command, tmp_path, given):
    run = tmp_path / "mine"
    (run / "monitoring").mkdir(parents=True)
    (run / "config.yaml").write_text("")
    (run / "monitoring" / "worker-00000.jsonl").write_text("{}\n")
    outcome = command("analyze_gpu_logs", "--log", run / given)
    assert outcome.code == 3
    assert outcome.err.endswith(f"python -m tools watch {run}\n")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--output", "--json"])
def test_log_is_not_overwritten(command, tmp_path, option):
    log = gpu_traces.thermal().write(tmp_path / "log.csv")
    before = log.read_bytes()
    outcome = command("analyze_gpu_logs", "--log", log, option, log)
    assert outcome.code == 2
    assert "is the log itself" in outcome.err
    assert log.read_bytes() == before


def test_help_shows_how_nvidia_smi_is_asked(command):
    outcome = command("analyze_gpu_logs", "--help")
    assert outcome.code == 0
    assert "nvidia-smi -l 1 --format=csv --query-gpu=$FIELDS" in outcome.out
