"""``train status`` shows the state of a run, once or until the run ends, without disturbing it."""

import socket
from collections.abc import Iterator

import pytest

from esmeray.run_folder.job import LOCK_FILE, held
from esmeray.run_folder.paths import Outcome, RunFolder
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
    outcome = command.done("train", "status", run.path)
    assert outcome.out.count("step 5") == 1 and "\x1b" not in outcome.out
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before


def test_following_waits_for_a_run_until_its_end(command, tmp_path, monkeypatch):
    monkeypatch.setattr("esmeray.tools.train.status.EVERY_S", 0.01)
    run = RunFolder(tmp_path, "later")

    def go_on() -> Iterator[None]:
        yield
        run.path.mkdir()
        (run.path / LOCK_FILE).write_text(f"1 on {socket.gethostname()}")  # the state after a kill
        run.config.write_text("run: {name: later}\n")
        yield
        append(run.metrics, train(5, 0))
        run.write_outcome(Outcome("stopped", 5, "stopped at step 5", 0))
        yield
        with held(run.path):
            run.clear_requests()
            yield
            append(run.metrics, train(6, 1))
            run.write_outcome(Outcome("finished", 6, "trained 6 steps", 0))
            yield
        yield

    changes = go_on()
    monkeypatch.setattr("time.sleep", lambda _: next(changes))
    outcome = command.done("train", "status", run.path, "--follow")
    assert outcome.out.startswith(f"waiting for the run to start: {run.path} is not a run folder")
    assert "finished, trained 6 steps" in outcome.out
    assert not list(changes), "the end of its process is waited for as well"
