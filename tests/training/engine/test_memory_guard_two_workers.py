import pytest
import torch.distributed as dist

from esmeray.cluster.collective import WorkerContext
from esmeray.training.config import Config
from esmeray.training.loop.worker import train_worker
from tests.runs import events, run_folder, tiny_config
from tests.training.engine.test_memory_guard import (
    assert_same_bits,
    assert_same_result,
    backward_needs_memory,
    forward_needs_memory,
)
from tests.worker_group import WorkerGroup

ENGINES = [(1, "fp32", False), (2, "bf16", True)]
"""ZeRO stage, precision, and whether the optimizer is offloaded."""

pytestmark = pytest.mark.slow


def train_rank(rank: int, runs: list[tuple[dict, str | None]], store_path: str) -> None:
    for config, fault in runs:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and fault == "forward":
                forward_needs_memory(patch)
            elif rank == 1 and fault == "backward":
                backward_needs_memory(patch, call=1)
            train_worker(Config.model_validate(config), WorkerContext(rank, 2, rank), store_path)
        dist.barrier()


def train(group: WorkerGroup, store_path: str, *runs: tuple[Config, str | None]) -> None:
    run_folder(runs[0][0]).path.mkdir(parents=True, exist_ok=True)
    group.run(train_rank, [(config.model_dump(), fault) for config, fault in runs], store_path)


def config_for(folder, **changes) -> Config:
    base = {
        "model": {"task": "masked_lm"},
        "batch": {"global_tokens": 1024},
        "training": {"max_steps": 4, "evaluate_every_steps": 100},
    }
    return tiny_config(folder, **{**base, **changes})


@pytest.fixture(scope="module")
def trained(worker_group, store_path, tmp_path_factory) -> dict[str, Config]:
    folder = tmp_path_factory.mktemp("trained")
    runs = [("undisturbed", {}, None), ("forward", {}, "forward")]
    for stage, precision, offload in ENGINES:
        changes = {
            "deepspeed": {"stage": stage, "offload_optimizer": offload},
            "training": {"max_steps": 2, "warmup_steps": 1, "evaluate_every_steps": 100, "precision": precision},
        }
        runs.append((f"{stage} {precision} in parts", changes, None))
        runs.append((f"{stage} {precision} guarded", changes, "backward"))
    configs = {name: config_for(folder / name, **changes) for name, changes, _ in runs}
    for name, config in configs.items():
        if "in parts" in name:
            run_folder(config).path.mkdir(parents=True)
            run_folder(config).memory_guard.write_text('{"parts": 2}')
    train(worker_group, store_path, *((configs[name], fault) for name, _, fault in runs))
    return configs


def parts(config: Config) -> list[tuple[int, int]]:
    return [(event["step"], event["parts"]) for event in events(config, "memory_guard")]


def test_running_out_on_one_worker_halves_on_both_and_changes_no_loss(trained):
    assert_same_result(trained["forward"], trained["undisturbed"])
    assert parts(trained["forward"]) == [(1, 2)]


@pytest.mark.parametrize(("stage", "precision", "offload"), ENGINES)
def test_broken_off_step_leaves_nothing_behind_on_either_worker(stage, precision, offload, trained):
    """To the last bit what a run gives that takes every batch in two parts from the start."""
    guarded, in_parts = trained[f"{stage} {precision} guarded"], trained[f"{stage} {precision} in parts"]
    assert parts(guarded) == parts(in_parts) == [(0, 2)]
    assert_same_bits(guarded, in_parts)
