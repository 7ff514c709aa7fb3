"""Copies of the state in memory: as good as a checkpoint, bounded, and gone when nobody needs them."""

import multiprocessing
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from unittest import mock

import pytest

from esmeray.cluster.collective import WorkerContext
from esmeray.common.errors import ConfigError
from esmeray.common.publishing import take_lock
from esmeray.training.checkpoints.writer import load_tensors
from esmeray.training.engine import memory_state
from esmeray.training.engine.memory_state import copy_bytes
from esmeray.training.loop.worker import train_worker
from tests.runs import events, run_folder, tiny_config
from tests.training.runs import Turn, assert_same_run, damage, lost_in_step, train, train_in_turn
from tests.worker_group import WorkerGroup

pytestmark = pytest.mark.slow

EVERY_STEP = {"checkpoint": {"every_steps": 4, "memory_every_steps": 1, "asynchronous": True}}


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own, which no run beside sweeps."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(memory_state, "SHARED_MEMORY", folder)
    return folder


def test_lost_worker_resumes_from_the_step_before_also_to_stop_at_once_and_nothing_is_left(
    undisturbed, store_path, tmp_path, shared_memory
):
    config = tiny_config(tmp_path, **EVERY_STEP)
    with lost_in_step(7):
        train(config, store_path)
    (kept,) = shared_memory.glob("esmeray-*/rank-00000")
    assert sorted(path.name for path in kept.glob("step-*")) == ["step-00000005", "step-00000006"]
    assert kept.parent.stat().st_mode & 0o077 == 0, "weights are not for others to read"
    run_folder(config).request_stop()
    assert train_worker(config, WorkerContext(), store_path).status == "stopped"
    train(config, store_path)
    resumed_from = [event["checkpoint"] for event in events(config, "resumed")]
    assert resumed_from == ["step-00000006 in memory", "step-00000006"]
    assert_same_run(config, undisturbed)
    assert not [*shared_memory.iterdir()]


def test_a_copy_that_is_damaged_or_of_another_command_is_not_used(undisturbed, store_path, tmp_path, shared_memory):
    config = tiny_config(tmp_path, **EVERY_STEP)
    with lost_in_step(8):
        train(config, store_path)
    damage(next(shared_memory.rglob("step-00000007")), "*model_states.pt")
    with lost_in_step(1):
        train(config, store_path)
    assert events(config, "resumed")[-1]["checkpoint"] == "step-00000006 in memory"
    other = config.model_copy(update={"training": config.training.model_copy(update={"evaluation_batches": 1})})
    with lost_in_step(1):
        train(other, store_path)
    assert events(config, "resumed")[-1]["checkpoint"] == "step-00000004"
    train(config, store_path)
    assert_same_run(config, undisturbed)
    assert not [*shared_memory.iterdir()]


@pytest.mark.parametrize("limited", [True, False], ids=["by the setting", "by the machine"])
def test_run_whose_two_copies_do_not_fit_is_refused_in_one_line(
    store_path, tmp_path, monkeypatch, limited, shared_memory
):
    usage = shutil.disk_usage(shared_memory)
    limit = 1e-5 if limited else None
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage if limited else usage._replace(free=20_000))
    config = tiny_config(tmp_path, checkpoint={"memory_every_steps": 1, "memory_limit_gib": limit})
    with pytest.raises(ConfigError, match=r"^checkpoint\.memory_every_steps: 2 copies of the state need .* GiB on "):
        train(config, store_path)
    assert run_folder(config).read_outcome().exit_code == 2
    assert not [*shared_memory.iterdir()]


def hold(folder: Path, holds: Event) -> None:
    take_lock(folder / ".lock", shared=True)
    (folder / "step-00000001").mkdir()
    holds.set()
    time.sleep(600)


def test_copies_of_a_run_whose_process_was_killed_are_removed_when_another_starts(shared_memory):
    folder, fork = shared_memory / "esmeray-0123" / "rank-00001", multiprocessing.get_context("fork")
    process = fork.Process(target=hold, args=(folder, holds := fork.Event()))
    process.start()
    holds.wait()
    memory_state.sweep()
    assert (folder / "step-00000001").exists()
    process.kill()
    process.join()
    memory_state.sweep()
    assert not [*shared_memory.iterdir()]


@contextmanager
def copies_in(folder: Path, lost_in: int, rank: int) -> Iterator[None]:
    """Copies in a folder of the test's own; the worker is lost in a step, from 1."""
    with mock.patch.object(memory_state, "SHARED_MEMORY", folder), lost_in_step(lost_in):
        yield


def assert_size(copy: Path) -> None:
    """The estimate that a run is refused by is what a copy takes, but for what each file takes besides."""
    files = [path.stat().st_size for path in copy.rglob("*.pt")]
    shapes = load_tensors(next(copy.rglob("*model_states.pt")))["param_shapes"]
    parameters = sum(shape.numel() for group in shapes for shape in group.values())
    estimate = copy_bytes(parameters, stage=2, world_size=2, precision="bf16")
    assert estimate == pytest.approx(sum(files), abs=16_384 * len(files))


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16"), (3, "bf16")])
def test_two_workers_resume_from_memory_to_the_same_bits_under_each_stage(
    stage, precision, store_path, tmp_path, worker_group: WorkerGroup, shared_memory
):
    training = {"max_steps": 4, "warmup_steps": 1, "evaluate_every_steps": 100, "precision": precision}
    whole, lost = (
        tiny_config(
            tmp_path / str(every_steps),
            deepspeed={"stage": stage},
            training=training,
            checkpoint={"every_steps": 100, "memory_every_steps": every_steps},
        )
        for every_steps in (None, 1)
    )
    shared, until_lost = (partial(copies_in, shared_memory, lost_in) for lost_in in (0, 3))
    train_in_turn(worker_group, 2, Turn(whole, store_path, shared), Turn(lost, store_path, until_lost))
    if stage == 2:
        for rank in range(2):
            assert_size(next(shared_memory.glob(f"*/rank-{rank:05d}/step-00000002")))
    train_in_turn(worker_group, 2, Turn(lost, store_path, shared))
    assert [event["step"] for event in events(lost, "resumed")] == [2]
    assert_same_run(lost, whole)
    assert not [*shared_memory.iterdir()]
