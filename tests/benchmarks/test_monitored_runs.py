"""Two runs at once: measured only while they are watched as was said, and ended whatever happens."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from benchmarks import monitored_runs as module
from benchmarks.monitored_runs import Evidence, Watching, side_by_side
from benchmarks.monitoring import NO_GUARD, OFF, ON, ONLINE
from benchmarks.stage import Setting, WrongWorkError
from run_folder.paths import RunFolder
from tests.benchmarks import counting_program

WORKERS = 2


class CountingLaunches:
    """Launches of programs that only count, watched as they are told to be."""

    def __init__(self, folder: Path, sampled: int, wandb: str) -> None:
        self.setting, self.workers, self.warmup_steps = Setting("cpu", True, folder), WORKERS, 2
        self._watched = (str(sampled), wandb)
        self._numbers = itertools.count()
        self.commands: dict[Path, list[str]] = {}

    def prepare(self, changes):
        run = RunFolder(self.setting.folder, f"run-{next(self._numbers)}")
        watched = self._watched if changes is not OFF and changes is not NO_GUARD else ("0", "")
        program = [sys.executable, counting_program.__file__, str(run.path), "0.01", *watched]
        self.commands[run.config] = program
        return run.config, run


def counting(folder: Path, monkeypatch, sampled: int = WORKERS, wandb: str = "offline-run-1") -> CountingLaunches:
    launches = CountingLaunches(folder, sampled, wandb)
    monkeypatch.setattr(module, "ray_command", lambda config: launches.commands[config])
    return launches


def beside_nothing(launches, changes=ON, server="none"):
    return side_by_side(launches, {"ours": Watching(changes, server), "peer": Watching(OFF)}, slice_s=0.1)


def test_runs_are_measured_in_turns_and_leave_no_process(tmp_path, monkeypatch):
    with beside_nothing(counting(tmp_path, monkeypatch)) as pair:
        assert pair.wait_until_steady() == {"first steps, checked to have the same losses": 2}
        assert pair.slice_of("ours")() > 0
        assert pair.slice_of("peer")() > 0
        families = [run.program.family for run in pair.runs.values()]
        assert all(family.living() for family in families)
    assert not any(family.living() for family in families)
    figures = ("CPU seconds of a million tokens", "of these beside the computation")
    assert {f"{figure}, {name}" for figure in figures for name in ("ours", "peer")} == set(pair.facts)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_interrupted_benchmark_leaves_neither_stopped_nor_running_processes(interruption, tmp_path, monkeypatch):
    families = []
    with pytest.raises(interruption), beside_nothing(counting(tmp_path, monkeypatch)) as pair:
        pair.wait_until_steady()
        families += [run.program.family for run in pair.runs.values()]
        pair.slice_of("ours")()
        raise interruption
    assert len(families) == 2
    assert not any(family.living() for family in families)


def test_run_that_ended_is_told_with_its_last_words(tmp_path, monkeypatch):
    launches = counting(tmp_path, monkeypatch)
    monkeypatch.setattr(module, "ray_command", lambda config: [sys.executable, "-c", "print('out of luck'); 1 / 0"])
    with beside_nothing(launches) as pair, pytest.raises(RuntimeError, match=r"code 1 (.|\n)*out of luck"):
        pair.wait_until_steady()


def test_run_of_which_a_worker_was_not_sampled_is_no_comparison(tmp_path, monkeypatch):
    launches = counting(tmp_path, monkeypatch, sampled=1)
    with beside_nothing(launches) as pair, pytest.raises(WrongWorkError, match="not every worker was sampled"):
        pair.wait_until_steady()


def test_run_whose_samples_cease_is_no_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    with beside_nothing(counting(tmp_path, monkeypatch)) as pair:
        pair.wait_until_steady()
        with pytest.raises(WrongWorkError, match="not every worker was sampled"):
            pair.slice_of("ours")()


def evidence(folder: Path, changes, server="none", recorded: str = "", sampled: int = 0) -> Evidence:
    run = RunFolder(folder, "run")
    run.monitoring.mkdir(parents=True)
    for worker in range(sampled):
        (run.monitoring / f"worker-{worker:05d}.jsonl").write_text('{"kind":"sample","step":0,"time":1.0}\n')
    if recorded:
        (run.path / "wandb" / recorded).mkdir(parents=True)
    return Evidence(Watching(changes, server), run, WORKERS)


@pytest.mark.parametrize(
    ("changes", "server", "recorded"),
    [
        (ON, "none", "offline-run-1"),
        (ONLINE, "unreachable", "offline-run-1"),
        (ONLINE, "slow", "run-1"),
        (ONLINE, "broken", "run-1"),
    ],
)
def test_each_way_of_watching_is_told_by_what_it_records(changes, server, recorded, tmp_path):
    evidence(tmp_path / "right", changes, server, recorded, WORKERS).require()
    with pytest.raises(WrongWorkError, match="W&B recorded nothing"):
        evidence(tmp_path / "nothing", changes, server, "", WORKERS).require()
    other, wrong = ("run-1", "online") if recorded.startswith("offline") else ("offline-run-1", "offline")
    with pytest.raises(WrongWorkError, match=f"W&B recorded it {wrong}"):
        evidence(tmp_path / "other", changes, server, other, WORKERS).require()


def test_run_without_monitoring_that_was_watched_is_no_comparison(tmp_path):
    evidence(tmp_path / "none", OFF).require()
    with pytest.raises(WrongWorkError, match="it was watched"):
        evidence(tmp_path / "sampled", OFF, sampled=1).require()
    with pytest.raises(WrongWorkError, match="W&B recorded a run"):
        evidence(tmp_path / "recorded", OFF, recorded="run-1").require()


def test_trouble_of_the_server_must_have_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "START_LIMIT_S", 1.0)
    launches = counting(tmp_path, monkeypatch, wandb="run-1")
    with beside_nothing(launches, ONLINE, "slow") as pair, pytest.raises(RuntimeError, match="not ready"):
        pair.wait_until_steady()
    assert pair.server is not None
