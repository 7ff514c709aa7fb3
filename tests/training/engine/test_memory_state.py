"""Copies of the state in memory: as good as a checkpoint, bounded, and gone when nobody needs them."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from esmeray.cluster.collective import ControlGroup, WorkerContext
from esmeray.common.errors import ConfigError, ResourceError
from esmeray.training.checkpoints.writer import load_tensors
from esmeray.training.config import Config
from esmeray.training.engine import memory_state
from esmeray.training.engine.engine import TrainingEngine
from esmeray.training.engine.memory_state import MemoryState, copy_bytes
from esmeray.training.loop.worker import train_worker
from esmeray.training.section import CheckpointSection
from tests.runs import events, exported_weights, run_folder, tiny_config, train_losses
from tests.worker_group import WorkerGroup

EVERY_STEP = {"checkpoint": {"every_steps": 4, "memory_every_steps": 1, "asynchronous": True}}
ENGINES = [(0, "fp32"), (2, "bf16"), (3, "bf16")]
"""ZeRO stage and precision."""


class LostError(ResourceError):
    retryable = True


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of the test's own, which no run beside sweeps."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(memory_state, "SHARED_MEMORY", folder)
    return folder


@contextmanager
def lost_in_step(number: int) -> Iterator[None]:
    """The process is lost in its step of this number, from 1."""
    with pytest.MonkeyPatch.context() as patch, suppress(LostError):
        honest, calls = TrainingEngine.step, []

        def step(self: TrainingEngine, *rates: float) -> object:
            calls.append(1)
            if len(calls) == number:
                raise LostError("lost")
            return honest(self, *rates)

        patch.setattr(TrainingEngine, "step", step)
        yield


def train(config: Config, store_path: str) -> None:
    run_folder(config).clear_requests()
    train_worker(config, WorkerContext(), store_path)


def assert_same_run(config: Config, undisturbed: Config) -> None:
    assert train_losses(config) == train_losses(undisturbed)
    expected, actual = exported_weights(undisturbed), exported_weights(config)
    assert expected
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def undisturbed(process_group: None, store_path: str, tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = tiny_config(tmp_path_factory.mktemp("undisturbed"))
    train(config, store_path)
    return config


def test_lost_worker_resumes_from_the_step_before_and_nothing_is_left(undisturbed, store_path, tmp_path, shared_memory):
    config = tiny_config(tmp_path, **EVERY_STEP)
    with lost_in_step(7):
        train(config, store_path)
    (kept,) = shared_memory.glob("esmeray-*/rank-00000")
    assert sorted(path.name for path in kept.glob("step-*")) == ["step-00000005", "step-00000006"]
    assert kept.parent.stat().st_mode & 0o077 == 0, "weights are not for others to read"
    train(config, store_path)
    assert [(event["step"], event["checkpoint"]) for event in events(config, "resumed")] == [
        (6, "step-00000006 in memory")
    ]
    assert_same_run(config, undisturbed)
    assert not [*shared_memory.iterdir()]


def damage(folder: Path) -> None:
    path = next(folder.rglob("*model_states.pt"))
    path.write_bytes(path.read_bytes()[:-1])


def test_a_copy_that_is_damaged_or_of_another_command_is_not_used(undisturbed, store_path, tmp_path, shared_memory):
    config = tiny_config(tmp_path, **EVERY_STEP)
    with lost_in_step(8):
        train(config, store_path)
    damage(next(shared_memory.rglob("step-00000007")))
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


def test_stop_right_after_resuming_from_memory_saves_to_the_disk(undisturbed, store_path, tmp_path):
    config = tiny_config(tmp_path, **EVERY_STEP)
    with lost_in_step(7):
        train(config, store_path)
    run_folder(config).request_stop()
    assert train_worker(config, WorkerContext(), store_path).status == "stopped"
    train(config, store_path)
    assert [event["checkpoint"] for event in events(config, "resumed")][-1] == "step-00000006"
    assert_same_run(config, undisturbed)


@pytest.mark.parametrize("limited", [True, False], ids=["by the setting", "by the machine"])
def test_run_whose_two_copies_do_not_fit_is_refused_in_one_line(
    store_path, tmp_path, monkeypatch, limited, shared_memory
):
    usage = shutil.disk_usage(shared_memory)
    limit = 1e-5 if limited else None
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage if limited else usage._replace(free=20_000))
    config = tiny_config(tmp_path, checkpoint={"memory_every_steps": 1, "memory_limit_gib": limit})
    with pytest.raises(ConfigError, match=r"^checkpoint\.memory_every_steps: 2 copies of the state take .* GiB on "):
        train(config, store_path)
    assert run_folder(config).read_outcome().exit_code == 2
    assert not [*shared_memory.iterdir()]


def test_copies_of_the_run_with_other_workers_take_no_room(process_group, shared_memory, monkeypatch):
    total, usage = 30_000, shutil.disk_usage(shared_memory)
    left = shared_memory / "esmeray-0123" / "rank-00000"
    left.mkdir(parents=True)
    (left / ".lock").touch()
    (left / "copy").write_bytes(bytes(20_000))

    def disk_usage(folder: Path) -> object:
        return usage._replace(free=total - sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    memory = MemoryState("fewer workers", CheckpointSection(), WorkerContext(), ControlGroup(), 10_000)
    assert not left.parent.exists()
    memory.close()


HOLDER = """
import sys, time
from pathlib import Path
from esmeray.common.publishing import take_lock
folder = Path(sys.argv[1])
take_lock(folder / ".lock", shared=True)
(folder / "step-00000001").mkdir()
print("holds", flush=True)
time.sleep(600)
"""


def test_copies_of_a_run_whose_process_was_killed_are_removed_when_another_starts(shared_memory):
    folder = shared_memory / "esmeray-0123" / "rank-00001"
    process = subprocess.Popen([sys.executable, "-c", HOLDER, folder], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "holds\n"
    memory_state.sweep()
    assert (folder / "step-00000001").exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    memory_state.sweep()
    assert not [*shared_memory.iterdir()]


def train_rank(rank: int, runs: list[tuple[dict, bool]], folder: Path, store_path: str) -> None:
    context = WorkerContext(rank, 2, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_state, "SHARED_MEMORY", folder)
        for config, is_lost in runs:
            settings = Config.model_validate(config)
            if is_lost:
                with lost_in_step(3):
                    train_worker(settings, context, store_path)
                if settings.deepspeed.stage == 2:
                    assert_size(settings, next(folder.glob(f"*/rank-{rank:05d}/step-00000002")))
            assert train_worker(settings, context, store_path).status == "finished"


def assert_size(settings: Config, copy: Path) -> None:
    """The estimate that a run is refused by is what a copy takes, but for what each file takes besides."""
    files = [path.stat().st_size for path in copy.rglob("*.pt")]
    shapes = load_tensors(next(copy.rglob("*model_states.pt")))["param_shapes"]
    parameters = sum(shape.numel() for group in shapes for shape in group.values())
    estimate = copy_bytes(parameters, stage=2, world_size=2, precision="bf16")
    assert estimate == pytest.approx(sum(files), abs=16_384 * len(files))


@pytest.mark.slow
def test_two_workers_resume_from_memory_to_the_same_bits_under_each_stage(
    store_path, tmp_path, worker_group: WorkerGroup, shared_memory
):
    training = {"max_steps": 4, "warmup_steps": 1, "evaluate_every_steps": 100}
    runs: dict[tuple[int, bool], Config] = {}
    for stage, precision in ENGINES:
        for is_lost in (False, True):
            changes = {"deepspeed": {"stage": stage}, "training": {**training, "precision": precision}}
            checkpoint = {"every_steps": 100, "memory_every_steps": 1 if is_lost else None}
            config = tiny_config(tmp_path / f"{stage} {is_lost}", **changes, checkpoint=checkpoint)
            run_folder(config).path.mkdir(parents=True)
            runs[stage, is_lost] = config
    calls = [(config.model_dump(), is_lost) for (_, is_lost), config in runs.items()]
    worker_group.run(train_rank, calls, shared_memory, store_path)
    for stage, _ in ENGINES:
        assert [event["step"] for event in events(runs[stage, True], "resumed")] == [2]
        assert_same_run(runs[stage, True], runs[stage, False])
    assert not [*shared_memory.iterdir()]
