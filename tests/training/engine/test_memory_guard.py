"""Out of memory, with one worker or on one of two: batches are split, and results stay the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from esmeray.common.errors import ResourceError
from esmeray.training.config import Config
from esmeray.training.engine.engine import TrainingEngine
from tests.runs import events, run_folder, tiny_config
from tests.training.runs import (
    Turn,
    assert_same_run,
    assert_same_to_rounding,
    on_worker_1,
    train,
    train_in_turn,
    without_faults,
)

pytestmark = pytest.mark.slow

FITS_TOKENS = 150
"""Maximum number of tokens that fit; batches have up to 256."""
ENGINES = [(0, "fp32", False), (0, "bf16", False), (1, "bf16", False), (2, "fp32", True)]
ENGINES_OF_TWO = [(1, "fp32", False), (2, "bf16", True)]
"""Engines of two workers: ZeRO stage, precision, and whether the optimizer is offloaded."""


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("injected: CUDA out of memory")


@contextmanager
def forward_needs_memory(from_call: int = 3) -> Iterator[list[int]]:
    """Large batches run out of memory from a training batch on; yield the sizes that are computed from then on."""
    honest, calls, sizes = TrainingEngine.__call__, [], []

    def call(self, batch):
        output = honest(self, batch)  # computed first, as in a pass that fails late; its memory is freed
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) >= from_call:
                if batch.num_tokens > FITS_TOKENS:
                    raise out_of_memory()
                sizes.append(batch.num_tokens)
        return output

    with mock.patch.object(TrainingEngine, "__call__", call):
        yield sizes


@contextmanager
def second_backward_needs_memory() -> Iterator[None]:
    """The second backward pass fails in the middle, after some gradients have been computed."""
    honest, calls = TrainingEngine.backward, []

    def backward(self, loss_sum, global_targets):
        calls.append(1)
        if len(calls) != 2:
            return honest(self, loss_sum, global_targets)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        handle = trained[len(trained) // 2].register_hook(fail)
        try:
            honest(self, loss_sum, global_targets)
        finally:
            handle.remove()

    def fail(gradient):
        raise out_of_memory()

    with mock.patch.object(TrainingEngine, "backward", backward):
        yield


@contextmanager
def backward_needs_memory_after(passes: int) -> Iterator[None]:
    """Run out of memory in a backward pass while other workers already wait in one of its collectives."""
    honest, calls = TrainingEngine.backward, []

    def backward(self, loss_sum, global_targets):
        honest(self, loss_sum, global_targets)
        calls.append(1)
        if len(calls) == passes:
            raise out_of_memory()

    with mock.patch.object(TrainingEngine, "backward", backward):
        yield


def config_for(folder: Path, **changes: Any) -> Config:
    training = {"max_steps": 4, "evaluate_every_steps": 100}
    return tiny_config(folder, **{"model": {"task": "masked_lm"}, "training": training, **changes})


def config_with(engine: tuple[int, str, bool], folder: Path, **changes: Any) -> Config:
    """A run of two steps; the first has more than one batch."""
    stage, precision, offload = engine
    training = {"max_steps": 2, "warmup_steps": 1, "evaluate_every_steps": 100, "precision": precision}
    deepspeed = {"stage": stage, "offload_optimizer": offload}
    return config_for(folder, deepspeed=deepspeed, training=training, **changes)


def taken_in_parts(config: Config) -> Config:
    """A run that splits every batch into two micro-batches from the start."""
    run_folder(config).path.mkdir(parents=True)
    run_folder(config).memory_guard.write_text('{"parts": 2}')
    return config


def parts(config: Config) -> list[tuple[int, int]]:
    return [(event["step"], event["parts"]) for event in events(config, "memory_guard")]


def test_out_of_memory_in_a_forward_pass_changes_no_loss(process_group, store_path, tmp_path):
    whole, guarded = (config_for(tmp_path / name) for name in ("whole", "guarded"))
    train(whole, store_path)
    with forward_needs_memory() as sizes:
        assert train(guarded, store_path).status == "finished"
    assert max(sizes) <= FITS_TOKENS
    assert_same_to_rounding(guarded, whole)
    assert [count for _, count in parts(guarded)] == [2]
    longer = guarded.model_copy(update={"training": guarded.training.model_copy(update={"max_steps": 5})})
    with forward_needs_memory(from_call=1) as sizes:
        train(longer, store_path)
    assert max(sizes) <= FITS_TOKENS
    assert "out of memory in an earlier attempt" in events(longer, "memory_guard")[-1]["message"]


@pytest.mark.parametrize("engine", ENGINES)
def test_broken_backward_pass_leaves_nothing_behind(process_group, engine, store_path, tmp_path):
    """The result is bitwise equal to a run that splits every batch into two micro-batches from the start."""
    in_parts, guarded = taken_in_parts(config_with(engine, tmp_path / "parts")), config_with(engine, tmp_path / "guard")
    train(in_parts, store_path)
    with second_backward_needs_memory():
        assert train(guarded, store_path).status == "finished"
    assert_same_run(guarded, in_parts)


def test_limit_on_the_cpu_is_out_of_memory(process_group, store_path, tmp_path):
    config = config_for(tmp_path, training={"max_steps": 2, "warmup_steps": 1, "cpu_memory_limit_mib": 1.0})
    with pytest.raises(ResourceError, match="out of memory"):
        train(config, store_path)
    outcome = run_folder(config).read_outcome()
    assert (outcome.status, outcome.exit_code) == ("failed", 4)
    assert "gradient_checkpointing" in outcome.message


def test_out_of_memory_on_one_worker_splits_the_step_on_both(worker_group, store_path, tmp_path):
    whole, guarded = (config_for(tmp_path / name, batch={"global_tokens": 1024}) for name in ("whole", "guarded"))
    pairs = []
    for number, engine in enumerate(ENGINES_OF_TWO):
        of_pair = {
            name: config_with(engine, tmp_path / f"{number} {name}", batch={"global_tokens": 1024}) for name in "ab"
        }
        pairs.append((taken_in_parts(of_pair["a"]), of_pair["b"]))

    def turn(config: Config, fault: Callable[[], Any] | None = None) -> Turn:
        return Turn(config, store_path, partial(on_worker_1, fault) if fault else without_faults)

    turns = [turn(whole), turn(guarded, forward_needs_memory)]
    for in_parts, broken in pairs:
        turns += [turn(in_parts), turn(broken, second_backward_needs_memory)]
    train_in_turn(worker_group, 2, *turns)
    assert_same_to_rounding(guarded, whole)
    assert parts(guarded) == [(1, 2)]
    for in_parts, broken in pairs:
        assert parts(broken) == parts(in_parts) == [(0, 2)]
        assert_same_run(broken, in_parts)


def test_out_of_memory_during_a_collective_restarts_with_smaller_batches(worker_group, store_path, tmp_path):
    batch = {"global_tokens": 1024}
    whole, broken = (config_for(tmp_path / name, batch=batch, checkpoint={"every_steps": 1}) for name in "ab")
    fault = partial(on_worker_1, partial(backward_needs_memory_after, 3))
    with pytest.raises(
        AssertionError, match="restarts from the last checkpoint, with every batch split into 2 micro-batches"
    ):
        train_in_turn(worker_group, 2, Turn(broken, store_path, fault))
    train_in_turn(worker_group, 2, Turn(broken, store_path), Turn(whole, store_path))
    assert parts(broken) == [(1, 2)] and events(broken, "resumed")[0]["step"] == 1
    assert_same_to_rounding(broken, whole)
