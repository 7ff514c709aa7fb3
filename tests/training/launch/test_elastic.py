import time
from collections.abc import Callable
from pathlib import Path

import pytest

from esmeray.cluster.collective import WorkerContext
from esmeray.cluster.placement import Capacity, Workers
from esmeray.cluster.section import RaySection
from esmeray.cluster.signals import StopSignals
from esmeray.common.errors import ResourceError
from esmeray.run_folder.checkpoints import CheckpointStore
from esmeray.run_folder.paths import Outcome, RunFolder
from esmeray.training.launch import elastic
from esmeray.training.launch.elastic import Attempts, Need
from esmeray.training.loop.worker import train_worker
from tests.runs import a_manifest, run_folder, tiny_config, train_losses

WORKERS = Workers(4, 1, use_gpu=False, sizes=(1, 2, 4))


def needs(count: int, held: list[int], stay: int = 3) -> list[str]:
    """Decisions on the number of workers; ``held`` is the cluster's capacity in workers, second by second."""
    need = Need(count, stay)
    for second, now in enumerate(held):
        need.look(Capacity(now, 4), second)
    return [need.why] if need.why else []


def test_run_grows_once_the_capacity_has_lasted_for_the_minimum_stay():
    assert needs(2, [4, 4, 4]) == []
    assert needs(2, [4, 4, 4, 4]) == ["the cluster now has room for 4 workers"]
    flapping = [4, 4, 4, 2] * 50
    assert needs(2, flapping) == [] and needs(2, [4, 4, 4, 0] * 50) == []
    assert needs(2, [*flapping, 4, 4, 4, 4]) == ["the cluster now has room for 4 workers"]
    assert needs(4, [4] * 50) == [] and needs(2, [1] * 50) == [], "fewer only where workers are lost"
    assert needs(2, [4], stay=0) == ["the cluster now has room for 4 workers"]


def test_run_leaves_a_machine_that_is_about_to_be_preempted():
    need = Need(2, 300)
    assert need.look(Capacity(2, 2, leaving=("10.0.0.3",)), 0.0)
    assert need.why == "10.0.0.3 is about to be preempted"


class MadeUpCluster:
    """A simulated cluster with room for ``now`` workers. Each attempt on it calls the next of ``ends``."""

    def __init__(self, folder: Path, now: int) -> None:
        self.run = RunFolder(folder, "run")
        self.run.path.mkdir()
        self.now, self.whole, self.counts, self.resized = now, 0, [], []
        self.signals = StopSignals()
        self.ends: list[Callable[[], None]] = []

    def train(self, **section: object) -> Exception | None:
        settings = RaySection(num_workers=(1, 4), allowed_workers=[1, 2, 4], minimum_stay_s=0.0, **section)
        return Attempts(self.run, WORKERS, lambda: self.look(), self.signals, settings).train(self.start)

    def look(self) -> Capacity:
        return Capacity(self.now, self.whole or self.now, "the cluster has nothing")

    def start(self, count: int, resized: dict | None) -> None:
        assert self.run.read_outcome() is None
        self.counts.append(count)
        self.resized.append(resized)
        self.ends.pop(0)()

    def hold(self, now: int, lost: bool = False, step: int = 0) -> Callable[[], None]:
        """An attempt during which the cluster's capacity changes to ``now`` workers; it ends when asked to."""

        def attempt() -> None:
            self.now = now
            if step:
                folder = CheckpointStore(self.run.checkpoints).folder(step).path
                folder.mkdir(parents=True)
                (folder / "manifest.json").write_text(a_manifest(step).sealed().model_dump_json())
            if lost:
                raise OSError("a machine is gone")
            while not self.run.end_requested():
                time.sleep(0.001)
            self.run.write_outcome(Outcome("stopped" if self.run.stop_request.exists() else "resizing", 5, "", 0))

        return attempt

    def finish(self) -> None:
        self.run.write_outcome(Outcome("finished", 9, "", 0))

    def interrupt(self) -> None:
        self.signals.received = 2
        self.run.stop_request.touch()


@pytest.fixture
def made_up(tmp_path, monkeypatch) -> MadeUpCluster:
    monkeypatch.setattr(elastic, "LOOK_S", 0.01)
    monkeypatch.setattr(elastic, "SETTLE_S", 0.05)
    return MadeUpCluster(tmp_path, now=4)


def test_the_number_of_workers_follows_the_cluster(made_up, capsys):
    made_up.ends = [made_up.hold(1, lost=True), made_up.hold(2), made_up.finish]
    assert made_up.train() is None
    assert made_up.counts == [4, 1, 2]
    assert made_up.resized == [
        None,
        {"from": 4, "to": 1, "why": "workers failed"},
        {"from": 1, "to": 2, "why": "the cluster now has room for 2 workers"},
    ]
    said = capsys.readouterr().out
    assert "workers failed, restarting from step 0" in said
    assert "the cluster now has room for 2 workers: saving a checkpoint" in said


def test_failures_are_counted_until_there_is_a_new_checkpoint(made_up):
    lost = [made_up.hold(4, lost=True, step=step) for step in (5, 0, 10, 0, 0)]
    made_up.ends = [*lost, made_up.finish]
    assert str(made_up.train(max_failures=2)) == "a machine is gone"
    assert made_up.counts == [4] * 5
    assert made_up.ends == [made_up.finish]


def test_a_signal_between_attempts_ends_the_run_as_one_within_them_does(made_up):
    made_up.ends = [lambda: (made_up.interrupt(), made_up.hold(2)())]
    made_up.train()
    assert (made_up.counts, made_up.run.read_outcome().status) == ([4], "stopped")
    made_up.run.clear_requests()
    made_up.train()
    assert (made_up.counts, made_up.run.read_outcome().status) == ([4], "stopped")


def test_a_cluster_that_does_not_answer_ends_the_wait_but_no_attempt(made_up):
    def unreachable() -> Capacity:
        raise ResourceError("does not answer")

    def attempt() -> None:
        made_up.look = unreachable
        time.sleep(0.05)
        made_up.finish()

    made_up.ends = [attempt]
    assert made_up.train() is None
    with pytest.raises(ResourceError, match="does not answer"):
        made_up.train()


def test_full_disk_ends_the_run_at_once_and_leaves_nothing_half_written(process_group, store_path, tmp_path, full_disk):
    config = tiny_config(tmp_path, checkpoint={"every_steps": 2})
    run = run_folder(config)
    run.path.mkdir()
    attempts = Attempts(run, WORKERS, lambda: Capacity(1, 1), StopSignals(), config.ray)
    with full_disk(32_768):
        attempts.train(lambda count, resized: train_worker(config, WorkerContext(), store_path))
    outcome = run.read_outcome()
    assert (outcome.status, outcome.exit_code) == ("failed", 4)
    assert "disk full" in outcome.message
    assert max(train_losses(config)) < 8
    assert not [path for path in run.path.rglob("*") if path.name.endswith((".tmp", ".partial", ".reserve"))]
