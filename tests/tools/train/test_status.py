"""``watch``: the state of a run, once or until it ends, and nothing that disturbs it."""

import threading
import time

import pytest

from run_folder.paths import Outcome, RunFolder
from tests.monitoring.samples import append, train


@pytest.fixture
def run(tmp_path) -> RunFolder:
    run = RunFolder(tmp_path, "mine")
    run.path.mkdir()
    run.config.write_text("run: {name: mine}\n")
    append(run.metrics, train(5, 0, step_s=1.0, tokens_per_s=100.0))
    return run


def test_state_is_printed_once_and_nothing_is_written(command, run):
    before = {path: path.read_bytes() for path in run.path.iterdir()}
    outcome = command("train", "status", run.path)
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("step 5") == 1 and "\x1b" not in outcome.out
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before


def test_following_ends_with_the_run(command, run):
    def finish() -> None:
        time.sleep(0.3)
        append(run.metrics, train(6, 1))
        run.write_outcome(Outcome("finished", 6, "trained 6 steps", 0))

    threading.Thread(target=finish).start()
    outcome = command("train", "status", run.path, "--follow")
    assert outcome.code == 0
    assert "finished, trained 6 steps" in outcome.out and "step 6" in outcome.out
