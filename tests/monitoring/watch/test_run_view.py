"""What a run's files say is shown: while they are written, before there are any, after the end, and when damaged."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from monitoring.watch.run_state import RunState
from monitoring.watch.run_view import draw_run
from monitoring.watch.text_charts import bar, chart, stacked_bar
from run_folder.metrics_log import encode_record
from run_folder.paths import Outcome, RunFolder
from training.checkpoints.resuming import locked

BEGUN = 1_750_000_000.0
GIB = 2**30


class Run:
    """A run's folder, written as the project writes it."""

    def __init__(self, folder: Path) -> None:
        self.files = RunFolder(folder.parent, folder.name)
        self.path = self.files.path
        self.path.mkdir(parents=True, exist_ok=True)
        self.files.config.write_text("run: {name: mine}\nmodel: {task: masked_lm, backbone: {source: esm2_t6_8M}}\n")

    def metrics(self, *records: dict[str, Any]) -> Run:
        with self.files.metrics.open("ab") as file:
            file.write(b"".join(encode_record(record) for record in records))
        return self

    def started(self, total_steps: int = 100) -> Run:
        return self.metrics({"kind": "event", "step": 0, "event": "started", "total_steps": total_steps, "time": BEGUN})

    def sample(self, worker: int, figures: dict[str, float], *, time: float, step: int = 1, host: str = "node") -> Run:
        folder = self.path / "monitoring"
        folder.mkdir(exist_ok=True)
        record = {"kind": "sample", "step": step, "time": time, "host": host, "worker": worker, "metrics": figures}
        with (folder / f"worker-{worker:05d}.jsonl").open("ab") as file:
            file.write(encode_record(record))
        return self

    def alert(self, name: str, state: str, message: str, time: float, subject: str = "GPU 0") -> Run:
        record = {"kind": "alert", "step": 1, "time": time, "name": name, "subject": subject, "state": state}
        with (self.path / "alerts.jsonl").open("ab") as file:
            file.write(encode_record({**record, "message": message}))
        return self


def train(step: int, **figures: Any) -> dict[str, Any]:
    usual = {"loss": 3.0 - step / 100, "tokens_per_s": 12_300.0, "step_s": 0.5, "data_wait_s": 0.05}
    return {"kind": "train", "step": step, "epoch": 0, "time": BEGUN + step / 2, **usual, **figures}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "mine")


def shown(state: RunState, now: float = BEGUN + 60, width: int = 120) -> str:
    state.update()
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(draw_run(state, now, width))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_header_tells_how_far_and_how_long(run):
    run.started(200).metrics(*(train(step) for step in range(1, 101)))
    text = shown(RunState(run.path), now=BEGUN + 51)
    for words in ("running", "step 100/200", "50%", "51 s so far · 50 s left", "12.3k tokens/s"):
        assert words in text


def test_view_goes_from_nothing_to_the_end(tmp_path):
    state = RunState(tmp_path / "mine")
    assert "not begun" in shown(state)
    run = Run(tmp_path / "mine").started(3)
    assert "starting" in shown(state, now=BEGUN + 1)
    run.metrics(train(1))
    assert "step 1/3" in shown(state, now=BEGUN + 1)
    run.metrics(train(2), train(3))
    assert "step 3/3" in shown(state, now=BEGUN + 2)
    run.files.write_outcome(Outcome("diverged", 3, "the loss is NaN", 5))
    text = shown(state, now=BEGUN + 9999)
    assert "diverged  the loss is NaN" in text
    assert "left" not in text
    assert "took 2 s" in text


def test_run_whose_process_was_killed_is_shown_as_broken_off_at_once(run):
    run.started().metrics(train(1), train(2))
    state = RunState(run.path)
    with locked(run.files):
        assert "running" in shown(state, now=BEGUN + 2)
        assert not state.has_ended
    text = shown(state, now=BEGUN + 2)
    assert "crashed" in text
    assert "the same command resumes it" in text
    assert "left" not in text
    assert state.has_ended
    with locked(run.files):
        assert "running" in shown(state, now=BEGUN + 2), "resumed"


def test_lock_of_another_host_says_nothing(run, monkeypatch):
    run.started().metrics(train(1), train(2))
    with monkeypatch.context() as there:
        there.setattr(socket, "gethostname", lambda: "another")
        with locked(run.files):
            pass
    state = RunState(run.path)
    assert "running" in shown(state, now=BEGUN + 2)
    assert "quiet" in shown(state, now=BEGUN + 300)


def test_damaged_lines_are_counted_and_the_rest_is_shown(run):
    run.started().metrics(train(1))
    with run.files.metrics.open("ab") as file:
        file.write(b"\0\0\0\0\nnot json\n[1]\n")
    run.metrics(train(2))
    text = shown(RunState(run.path))
    assert "step 2/100" in text
    assert "3 damaged lines passed over" in text


def test_rewound_run_forgets_what_is_void(run):
    run.started().metrics(*(train(step) for step in range(1, 51)))
    state = RunState(run.path)
    assert "step 50/100" in shown(state)
    records = [json.loads(line) for line in run.files.metrics.read_text().splitlines()][:21]
    replacement = run.path / "new"
    replacement.write_bytes(b"".join(encode_record(record) for record in records))
    replacement.replace(run.files.metrics)
    run.metrics({"kind": "event", "step": 20, "event": "resumed", "time": BEGUN + 100})
    assert "step 20/100" in shown(state)
    assert len(state.steps) == 20


def test_time_between_two_attempts_is_no_part_of_a_step(run):
    run.started().metrics(*(train(step) for step in range(1, 31)))
    run.metrics({"kind": "event", "step": 30, "event": "resumed", "time": BEGUN + 5000})
    run.metrics(*(train(step, time=BEGUN + 5000 + (step - 30) / 2) for step in range(31, 41)))
    assert "30 s left" in shown(RunState(run.path), now=BEGUN + 5006)


def test_devices_are_shown_with_load_memory_and_why_they_are_slow(run):
    figures = {
        "gpu/0/util": 93.0,
        "gpu/0/mem_used_bytes": 40.0 * GIB,
        "gpu/0/mem_total_bytes": 80.0 * GIB,
        "gpu/0/temperature_c": 88.0,
        "gpu/0/power_w": 512.0,
        "gpu/0/throttle_reasons": 0x40,
        "gpu/1/util": 12.0,
        "mem/host_total_bytes": 64.0 * GIB,
        "mem/host_used_bytes": 16.0 * GIB,
        "cpu/percent": 37.0,
    }
    run.started().metrics(train(1)).sample(0, figures, time=BEGUN + 1)
    text = shown(RunState(run.path), now=BEGUN + 2, width=160)
    for words in ("GPU 0", "93%", "40.0G", "88°C 512W", "hardware thermal slowdown", "GPU 1", "37%"):
        assert words in text


@pytest.mark.parametrize(("width", "rate"), [(80, 2.4e9), (96, 2.4e9), (160, 0.0)])
def test_disk_is_shown_whole_at_any_width(run, width, rate):
    figures = {
        "mem/host_total_bytes": 1024.0 * GIB,
        "mem/host_used_bytes": 512.0 * GIB,
        "cpu/percent": 100.0,
        "disk/read_bytes_per_s": rate,
        "disk/write_bytes_per_s": rate,
    }
    run.started().metrics(train(1)).sample(0, figures, time=BEGUN + 1)
    assert f"disk {rate / 1e6:.0f}/{rate / 1e6:.0f} MB/s" in shown(RunState(run.path), width=width)


def test_workers_are_shown_with_when_they_were_seen(run):
    run.started().metrics(train(1))
    for rank in (0, 1):
        run.sample(rank, {f"worker/{rank}/rss_bytes": (1 + rank) * GIB}, time=BEGUN + 100 - 90 * rank, step=7 + rank)
    text = shown(RunState(run.path), now=BEGUN + 102)
    lines = [line for line in text.splitlines() if "node" in line]
    assert "2 s ago" in lines[0]
    assert "1:32 ago" in lines[1]
    assert "2.00G" in lines[1]


def test_of_many_workers_those_that_fell_silent_are_among_the_shown(run):
    run.started().metrics(train(1))
    for rank in range(40):
        run.sample(rank, {f"worker/{rank}/rss_bytes": GIB}, time=BEGUN + (0 if rank == 33 else 500))
    text = shown(RunState(run.path), now=BEGUN + 501)
    assert "workers (12 of 40)" in text
    assert "8:21 ago" in text


def test_alerts_that_hold_come_first_and_those_over_stay(run):
    run.started().metrics(train(1))
    run.alert("throttling", "raised", "too hot", BEGUN + 1, "GPU 1")
    run.alert("memory", "raised", "98 % in use", BEGUN + 2).alert("memory", "cleared", "below again", BEGUN + 3)
    text = shown(RunState(run.path), now=BEGUN + 10)
    assert text.index("! throttling  too hot") < text.index("✓ memory  below again")
    assert "98 % in use" not in text
    assert "none" in shown(RunState(Run(run.path.parent / "other").started().path))


def test_age_of_an_alert_is_counted_to_the_end_of_a_run_that_has_ended(run):
    run.started().metrics(train(1), train(8)).alert("memory", "raised", "98 % in use", BEGUN + 2)
    assert "98 % in use  8 s ago" in shown(RunState(run.path), now=BEGUN + 10)
    run.files.write_outcome(Outcome("finished", 0, "trained 8 steps", 8))
    assert "98 % in use  2 s before the end" in shown(RunState(run.path), now=BEGUN + 9999)


def test_split_of_a_step_adds_up(run):
    parts = {"forward_s": 0.1, "backward_s": 0.2, "optimizer_s": 0.05, "communication_s": 0.05, "checkpoint_s": 0.01}
    run.started().metrics(*(train(step, **parts) for step in range(1, 9)))
    state = RunState(run.path)
    text = shown(state)
    split = state.step_split()
    assert sum(value for name, value in split.items() if name != "checkpoint") == pytest.approx(0.5)
    assert "a step: 500 ms, and 10.0 ms for checkpoints" in text
    for words in ("data wait 10.0%", "forward 20.0%", "backward 40.0%", "communication 10.0%", "other 10.0%"):
        assert words in text


def test_folder_that_can_not_be_read_for_a_while_is_said(run, monkeypatch):
    run.started().metrics(train(1))
    state = RunState(run.path)
    shown(state)

    def stale(*_, **__):
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", stale)
        assert "metrics.jsonl: Stale file handle" in shown(state)
    text = shown(state)
    assert "Stale" not in text
    assert "step 1/100" in text


@pytest.mark.parametrize("width", [60, 96, 200])
def test_nothing_is_wider_than_the_terminal(run, width):
    figures = {"gpu/0/util": 93.0, "mem/host_total_bytes": 64.0 * GIB, "cpu/percent": 3.0}
    run.started().metrics(*(train(step) for step in range(1, 90))).sample(0, figures, time=BEGUN)
    run.alert("memory", "raised", "word " * 60, BEGUN)
    text = shown(RunState(run.path), width=width)
    assert max(map(len, text.splitlines())) <= width


def test_half_written_config_is_read_again_later(run):
    run.started().metrics(train(1)).files.config.write_text("run: [")
    state = RunState(run.path)
    assert "step 1/100" in shown(state)
    run.files.config.write_text("run: {name: whole}\n")
    assert "whole" in shown(state)


@pytest.mark.parametrize("values", [[], [None], [2.0], [float("nan"), 0.5, 1.0, 7.0]])
def test_charts_of_anything_have_their_size(values):
    for share in values:
        assert len(bar(share, 7, "blue")) == 7
    assert len(stacked_bar([(0.1, "red"), (0.2, "red"), (99.0, "red")], 31)) == 31
    lines = chart(values, 12, 3, "blue").plain.split("\n")
    assert len(lines) == 3
    assert max(map(len, lines)) <= 12
