"""Memory that runs out on one of two workers: neither waits for the other for ever, and no loss changes."""

import pytest
import torch
import torch.distributed as dist

from tests.runs import events, exported_weights, run_folder, tiny_config, train_losses
from tests.worker_pair import WorkerPair
from train_config.schema import Config
from training.engine.context import WorkerContext
from training.engine.engine import TrainingEngine
from training.loop.worker import train_worker

FITS_TOKENS = 150
"""Of batches of up to 256."""
FORWARD, BACKWARD = TrainingEngine.__call__, TrainingEngine.backward

ENGINES = [(1, "none", False), (2, "bf16", True)]
"""ZeRO stage, precision, and whether the optimizer is offloaded."""

pytestmark = pytest.mark.slow


def train_rank(rank: int, runs: list[tuple[dict, str | None]], store_path: str) -> None:
    try:
        for config, fault in runs:
            TrainingEngine.__call__, TrainingEngine.backward = FORWARD, BACKWARD
            if rank == 1 and fault is not None:
                FAULTS[fault]()
            train_worker(Config.model_validate(config), WorkerContext(rank, 2, rank), store_path)
            dist.barrier()
    finally:
        TrainingEngine.__call__, TrainingEngine.backward = FORWARD, BACKWARD


def forward_needs_memory() -> None:
    """From the third training batch on, large ones do not fit on this worker."""
    calls = []

    def call(self, batch):
        output = FORWARD(self, batch)
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) > 2 and batch.num_tokens > FITS_TOKENS:
                raise torch.OutOfMemoryError("injected")
        return output

    TrainingEngine.__call__ = call


def backward_needs_memory() -> None:
    """The backward pass of the first step's second batch breaks off in the middle."""
    calls = []

    def fail(gradient):
        raise torch.OutOfMemoryError("injected")

    def backward(self, loss_sum, global_targets):
        calls.append(1)
        if len(calls) != 2:
            return BACKWARD(self, loss_sum, global_targets)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        handle = trained[len(trained) // 2].register_hook(fail)
        try:
            BACKWARD(self, loss_sum, global_targets)
        finally:
            handle.remove()

    TrainingEngine.backward = backward


FAULTS = {"forward": forward_needs_memory, "backward": backward_needs_memory}


def train(pair: WorkerPair, store_path: str, *runs: tuple[Config, str | None]) -> None:
    """The runs one after the other, each with its fault."""
    run_folder(runs[0][0]).path.mkdir(parents=True, exist_ok=True)
    pair.run(train_rank, [(config.model_dump(), fault) for config, fault in runs], store_path)


def config_for(folder, **changes) -> Config:
    """Four micro-batches a step, two on each worker."""
    base = {
        "model": {"task": "masked_lm"},
        "batch": {"global_tokens": 1024},
        "training": {"max_steps": 4, "evaluate_every_steps": 100},
    }
    return tiny_config(folder, **{**base, **changes})


@pytest.fixture(scope="module")
def trained(worker_pair, store_path, tmp_path_factory) -> dict[str, Config]:
    """Runs that needed no new start, by name."""
    folder = tmp_path_factory.mktemp("trained")
    runs = [("undisturbed", {}, None), ("forward", {}, "forward")]
    for stage, amp_dtype, offload in ENGINES:
        changes = {
            "deepspeed": {"stage": stage, "offload_optimizer": offload},
            "training": {"max_steps": 2, "warmup_steps": 1, "evaluate_every_steps": 100, "amp_dtype": amp_dtype},
        }
        runs.append((f"{stage} {amp_dtype} in parts", changes, None))
        runs.append((f"{stage} {amp_dtype} guarded", changes, "backward"))
    configs = {name: config_for(folder / name, **changes) for name, changes, _ in runs}
    for name, config in configs.items():
        if "in parts" in name:
            run_folder(config).path.mkdir(parents=True)
            run_folder(config).memory_guard.write_text('{"parts": 2}')
    train(worker_pair, store_path, *((configs[name], fault) for name, _, fault in runs))
    return configs


def parts(config: Config) -> list[tuple[int, int]]:
    """The guard's events, as step and parts."""
    return [(event["step"], event["parts"]) for event in events(config, "memory_guard")]


def test_running_out_on_one_worker_halves_on_both_and_changes_no_loss(trained):
    assert train_losses(trained["forward"]) == pytest.approx(train_losses(trained["undisturbed"]), rel=1e-5)
    assert parts(trained["forward"]) == [(1, 2)]


@pytest.mark.parametrize(("stage", "amp_dtype", "offload"), ENGINES)
def test_broken_off_step_leaves_nothing_behind_on_either_worker(stage, amp_dtype, offload, trained):
    """To the last bit what a run gives that takes every batch in two parts from the start."""
    guarded, in_parts = trained[f"{stage} {amp_dtype} guarded"], trained[f"{stage} {amp_dtype} in parts"]
    assert parts(guarded) == parts(in_parts) == [(0, 2)]
    assert train_losses(guarded) == train_losses(in_parts)
    weights = exported_weights(in_parts)
    assert all(torch.equal(value, weights[name]) for name, value in exported_weights(guarded).items())
