"""A run's state is read from its files: during the run, after its end, and after a kill."""

import os
import socket
import time
from pathlib import Path

import pytest

from esmeray.common.errors import ConfigError
from esmeray.monitoring.watch.status import RunStatus
from esmeray.run_folder.checkpoints import MANIFEST, CheckpointStore
from esmeray.run_folder.job import LOCK_FILE, held
from esmeray.run_folder.paths import Outcome, RunFolder
from esmeray.tasks.registry import metric_labels
from tests.monitoring.samples import append
from tests.runs import a_manifest


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path, "mine")
    run.path.mkdir()
    run.config.write_text("training: {precision: fp32}\nbatch: {tokens: 4096}\n")
    append(run.metrics, {"kind": "event", "event": "started", "step": 0, "total_steps": 100, "time": time.time() - 100})
    return run


def step(number: int, **values: float | None) -> dict[str, object]:
    usual = {"loss": 3.0, "tokens_per_s": 12_300.0, "step_s": 0.5, "data_wait_s": 0.01, "forward_s": 0.2}
    return {"kind": "train", "step": number, "time": time.time() - 100 + number, **usual, **values}


def lines(run: RunFolder) -> list[str]:
    status = RunStatus(run.path, metric_labels())
    status.update()
    return list(status.lines())


def test_running_run_has_step_speed_time_left_and_bottleneck(run):
    append(run.metrics, *(step(number) for number in range(60, 76)))
    append(run.metrics, {"kind": "validation", "step": 75, "time": time.time(), "loss": 2.0})
    assert lines(run)[:4] == [
        "mine: running",
        "  step 75 of 100 (75%), loss 3.0000",
        "  12.3k tokens/s, 1 s per step, 25 s left",
        "  step 75: validation loss 2.0000",
    ]
    assert "Compute is the bottleneck" in lines(run)[4] and "set training.precision: bf16" in lines(run)[4]
    append(run.metrics, step(99, loss=None, data_wait_s=0.4))
    append(run.alerts, {"kind": "alert", "step": 9, "name": "loss", "state": "raised", "message": "not finite"})
    assert "loss NaN" in lines(run)[1]
    assert lines(run)[-1] == "  warning: not finite"


def test_damage_is_a_line_of_the_state(run):
    append(run.metrics, *(step(number) for number in range(1, 4)))
    run.metrics.write_bytes(run.metrics.read_bytes().replace(b'"loss":3.0', b'"loss":2.0', 1))
    assert [line for line in lines(run) if "skipped" in line]
    run.config.write_bytes(b"training: {precision: fp\xff32}")
    with pytest.raises(ConfigError, match="not valid YAML"):
        lines(run)
    with pytest.raises(ConfigError, match="did you mean mine"):
        RunStatus(run.path.parent / "mime", metric_labels())


def test_states_before_the_first_step_and_after_the_end(run):
    assert lines(run) == ["mine: starting, no step completed yet"]
    append(run.metrics, step(1))
    assert lines(run)[0] == "mine: running", "its clock is a hundred seconds behind"
    os.utime(run.metrics, (time.time() - 100,) * 2)
    assert lines(run)[0].startswith("mine: quiet")
    run.write_outcome(Outcome("finished", 1, "trained 1 step", 0))
    assert lines(run)[0] == "mine: finished, trained 1 step"


def test_a_killed_run_is_reported_as_saved_once_its_lock_is_free(run):
    append(run.metrics, step(99))
    with held(run.path):
        assert lines(run)[0] == "mine: running"
    ended = "mine: ended without an outcome (probably killed), saved up to step"
    assert lines(run)[0] == f"{ended} 0 of 99; the same command resumes it"
    for number in (90, 99):
        folder = CheckpointStore(run.checkpoints).folder(number).path
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text(a_manifest(number).sealed().model_dump_json())
        assert lines(run)[0] == f"{ended} {number} of 99; the same command resumes it"
    assert not any("left" in line for line in lines(run))
    (run.path / LOCK_FILE).write_text(f"1 not-{socket.gethostname()}\n")
    assert lines(run)[0] == "mine: running", "another machine's lock may not be seen from here"
