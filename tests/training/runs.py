"""Runs of the training loop in this process or in a group of workers, with or without faults, and their comparison."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from esmeray.cluster.collective import WorkerContext
from esmeray.common.errors import ResourceError
from esmeray.run_folder.paths import Outcome
from esmeray.tasks.plan import task_plan
from esmeray.tools.train.export import main as export
from esmeray.train_config.loading import dump_config
from esmeray.train_config.section import with_absolute_paths
from esmeray.training.config import Config
from esmeray.training.engine.engine import TrainingEngine
from esmeray.training.loop.worker import train_worker
from tests.runs import exported_weights, run_folder, train_losses
from tests.worker_group import WorkerGroup

Disturbance = Callable[[int], AbstractContextManager[Any]]
"""Function of a rank that returns a context manager, which injects a fault into the rank's worker."""


def train(config: Config, store_path: str | Path) -> Outcome:
    run_folder(config).clear_requests()
    return train_worker(config, WorkerContext(), str(store_path))


def prepared(config: Config) -> Path:
    """Prepare a run folder like the driver, with the run's data; return the data's path."""
    run, task = run_folder(config), task_plan(config.data, config.model)
    run.path.mkdir(parents=True, exist_ok=True)
    run.config.write_text(dump_config(with_absolute_paths(config)))
    path = task.prepare(run.stores)
    task.write_names(run, path)
    return path


def finish(config: Config) -> Outcome:
    """Prepare the data and train to the end."""
    return train(config, prepared(config))


def stop_after(config: Config, store_path: str, step: int) -> None:
    """Train until the checkpoint of this step is reported, then stop."""
    run = run_folder(config)
    run.path.mkdir(parents=True, exist_ok=True)
    run.clear_requests()

    def report(metrics: dict[str, float]) -> None:
        if metrics["step"] == step:
            run.stop_request.touch()

    outcome = train_worker(config, WorkerContext(report=report), store_path)
    assert (outcome.status, outcome.step) == ("stopped", step)


def without_faults(rank: int) -> AbstractContextManager[None]:
    return nullcontext()


class Turn(NamedTuple):
    """An attempt of a run by a group of workers; ``stop_at``: step of the checkpoint after which it is stopped."""

    config: Config
    store_path: str
    disturbance: Disturbance = without_faults
    stop_at: int | None = None


def train_rank(rank: int, workers: int, turns: list[Turn]) -> None:
    for turn in turns:
        run = run_folder(turn.config)

        def report(metrics: dict[str, float], run=run, stop_at=turn.stop_at) -> None:
            if rank == 0 and metrics["step"] == stop_at:
                run.stop_request.touch()

        if rank == 0:
            run.path.mkdir(parents=True, exist_ok=True)
            run.clear_requests()
        dist.barrier()
        with turn.disturbance(rank):
            train_worker(turn.config, WorkerContext(rank, workers, rank, report=report), turn.store_path)


def train_in_turn(group: WorkerGroup, workers: int, *turns: Turn) -> None:
    group.run(train_rank, workers, list(turns), workers=workers)


def train_with(workers: int, config: Config, store_path: str, group: WorkerGroup) -> None:
    """Train to the end; one worker runs in this process, several in the group."""
    if workers == 1:
        train(config, store_path)
    else:
        train_in_turn(group, workers, Turn(config, store_path))


def on_worker_1(disturbance: Callable[[], AbstractContextManager[Any]], rank: int) -> AbstractContextManager[Any]:
    return disturbance() if rank == 1 else nullcontext()


class LostError(ResourceError):
    retryable = True


@contextmanager
def lost_in_step(number: int) -> Iterator[None]:
    """Simulate the loss of the process in its n-th step, counted from 1."""
    honest, calls = TrainingEngine.step, []

    def step(self: TrainingEngine, *rates: float) -> object:
        calls.append(1)
        if len(calls) == number:
            raise LostError("lost")
        return honest(self, *rates)

    with mock.patch.object(TrainingEngine, "step", step), suppress(LostError):
        yield


@contextmanager
def nan_in_steps(steps: set[int] | range) -> Iterator[None]:
    """Make the losses of these steps NaN; steps of the process are counted from 0."""
    honest, honest_step, taken = TrainingEngine.backward, TrainingEngine.step, []

    def backward(self: TrainingEngine, loss_sum: torch.Tensor, global_targets: int) -> None:
        honest(self, loss_sum * (float("nan") if len(taken) in steps else 1.0), global_targets)

    def step(self: TrainingEngine, *rates: float) -> object:
        taken.append(1)
        return honest_step(self, *rates)

    with mock.patch.multiple(TrainingEngine, backward=backward, step=step):
        yield


def damage(folder: Path, name: str = "*optim_states.pt") -> None:
    """Flip a bit in a file of a checkpoint."""
    path = next(folder.rglob(name))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def assert_same_run(config: Config, expected: Config) -> None:
    """Check that losses and weights of two runs are bitwise equal."""
    assert train_losses(config) == train_losses(expected)
    assert_same_weights(config, expected)


def assert_same_weights(config: Config, expected: Config) -> None:
    wanted = exported_weights(expected)
    actual = exported_weights(config)
    assert wanted and wanted.keys() == actual.keys()
    assert all(torch.equal(actual[name], weight) for name, weight in wanted.items())


def assert_same_to_rounding(config: Config, expected: Config, atol: float = 1e-5) -> None:
    """Check that losses and weights of two runs differ only by the rounding of sums in another order."""
    assert train_losses(config) == pytest.approx(train_losses(expected), rel=1e-5)
    actual = exported_weights(config)
    for name, weight in exported_weights(expected).items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-5, atol=atol)


def assert_shards_make_the_exported_weights(config: Config, folder: Path) -> None:
    run = run_folder(config)
    run.config.write_text(dump_config(config))
    assert export([str(run.path), "--export.output", str(folder)]) == 0
    for path in run.export.glob("*.safetensors"):
        expected, actual = load_file(path), load_file(folder / path.name)
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
