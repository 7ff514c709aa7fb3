"""A run whose number of workers changes is the run that never changed: 2, 1, 3, 4 and 2 workers, under every stage."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from esmeray.cluster.collective import WorkerContext
from esmeray.training.config import Config
from esmeray.training.engine import memory_state
from esmeray.training.loop.worker import train_worker
from tests.runs import events, exported_weights, run_folder, tiny_config, train_losses
from tests.tasks.test_diffusion import diffusion_config
from tests.training.engine.test_memory_state import lost_in_step
from tests.training.loop.test_worker import damage, spoil
from tests.worker_group import WorkerGroup

WORKERS = (2, 1, 3, 4, 2)
"""One after the other, two steps each, of four batches: of three workers two take one that counts for nothing."""
RUNS = ["stage 0", "stage 1", "stage 2", "stage 3", "layout 3", "dropout", "muon 2"]

pytestmark = pytest.mark.slow


def config_of(name: str, folder: Path, store_path: str) -> tuple[Config, str]:
    """The config of a run and the path of its store; ``layout``: with settings that the layout of shards depends on."""
    stage = int(name[-1]) if name[-1].isdigit() else 2
    changes = {
        "deepspeed": {"stage": stage},
        "model": {"task": "masked_lm"},
        "batch": {"global_tokens": 1024},
        "training": {"max_steps": 10, "evaluate_every_steps": 100, "precision": name[:4] if "bf16" in name else "fp32"},
        "checkpoint": {"every_steps": 2, "keep_last": 2},
    }
    if name.startswith("muon"):
        changes["training"]["optimizer"] = "muon"
    if name.startswith("layout"):
        folder.mkdir()
        changes["deepspeed"]["config"] = str(folder / "layout.yaml")
        (folder / "layout.yaml").write_text("zero_optimization: {sub_group_size: 1000, parameter_alignment: true}\n")
    if name == "dropout":
        changes["batch"] = {"global_tokens": 2048}
        changes["model"] = {"diffusion": {"encoder": {"dropout": 0.2}}}
        return diffusion_config(folder, **changes)
    return tiny_config(folder, **changes), store_path


def train_rank(rank: int, workers: int, runs: list[tuple[dict, str]], stop_at: int | None) -> None:
    for config, store_path in runs:
        run = run_folder(Config.model_validate(config))

        def report(metrics: dict[str, float], run=run) -> None:
            if rank == 0 and metrics["step"] == stop_at:
                run.request_stop()

        if rank == 0:
            run.path.mkdir(parents=True, exist_ok=True)
            run.clear_requests()
        dist.barrier()
        train_worker(Config.model_validate(config), WorkerContext(rank, workers, rank, report=report), store_path)


def train(group: WorkerGroup, workers: int, runs: list[tuple[Config, str]], stop_at: int | None = None) -> None:
    group.run(train_rank, workers, [(config.model_dump(), path) for config, path in runs], stop_at, workers=workers)


@pytest.fixture(scope="module")
def trained(worker_group, store_path, tmp_path_factory) -> dict[str, dict[str, Config]]:
    """The runs by name: with one worker, with two, and with changing numbers."""
    root = tmp_path_factory.mktemp("trained")
    named = {"one": ["bf16 2"], "two": [*RUNS, "bf16 2"], "changing": [*RUNS, "bf16 2"]}
    runs = {}
    for kind, names in named.items():
        runs[kind] = {name: config_of(name, root / f"{kind} {name}", store_path) for name in names}
    train(worker_group, 1, list(runs["one"].values()))
    train(worker_group, 2, list(runs["two"].values()))
    for number, workers in enumerate(WORKERS, start=1):
        last = number == len(WORKERS)
        train(worker_group, workers, list(runs["changing"].values()), None if last else 2 * number)
    return {kind: {name: config for name, (config, _) in of_kind.items()} for kind, of_kind in runs.items()}


def assert_same_run(config: Config, expected: Config, *, weights: float) -> None:
    losses = train_losses(expected)
    assert len(losses) == 10
    assert train_losses(config) == pytest.approx(losses, rel=1e-5)
    exported = exported_weights(config)
    for name, weight in exported_weights(expected).items():
        torch.testing.assert_close(exported[name], weight, rtol=weights, atol=weights)


@pytest.mark.parametrize("name", RUNS)
def test_run_with_changing_numbers_of_workers_is_the_one_that_kept_them(trained, name):
    changing = trained["changing"][name]
    assert [event["workers"] for event in events(changing, "resumed")] == list(WORKERS[1:])
    # AdamW divides a gradient by its own size, so that rounding shows where it is near 0.
    assert_same_run(changing, trained["two"][name], weights=2e-4 if name == "dropout" else 1e-5)


def test_in_bf16_it_differs_about_as_much_as_runs_of_one_and_of_two_workers_do(trained):
    one, two, changing = (train_losses(trained[kind]["bf16 2"]) for kind in ("one", "two", "changing"))
    assert len(changing) == len(two) == 10
    difference = max(abs(one[step] - two[step]) for step in two)
    # Both are the rounding of sums in another order, of one size on any machine but not in one order.
    assert max(abs(changing[step] - two[step]) for step in two) <= 2 * difference


def test_damaged_shard_of_a_worker_that_is_gone_leaves_the_checkpoint_before(
    trained, worker_group, store_path, tmp_path: Path
):
    run = config_of("stage 2", tmp_path, store_path)
    train(worker_group, 2, [run], stop_at=4)
    damage(run_folder(run[0]).checkpoints / "step-00000004", "*zero_pp_rank_1*optim_states.pt")
    train(worker_group, 1, [run])
    assert "step-00000004 can't be used" in events(run[0], "warning")[0]["message"]
    assert events(run[0], "resumed")[0]["step"] == 2
    assert_same_run(run[0], trained["two"]["stage 2"], weights=1e-5)


def train_rank_with_faults(
    rank: int, workers: int, run: tuple[dict, str], shared_memory: Path, spoiled: set[int], lost_in: int
) -> None:
    config, store_path = run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_state, "SHARED_MEMORY", shared_memory)
        spoil(patch, spoiled)
        with lost_in_step(lost_in):
            train_worker(Config.model_validate(config), WorkerContext(rank, workers, rank), store_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_run_that_lost_a_worker_takes_no_copy_in_memory_and_rewinds_to_a_checkpoint_of_more_workers(
    stage, worker_group, store_path, tmp_path: Path
):
    attempts = {"kept": [(2, {4, 5}, 0)], "lost one": [(2, set(), 6), (1, {0, 1}, 0)]}
    runs = {}
    for name, parts in attempts.items():
        config, _ = config_of(f"stage {stage}", tmp_path / name, store_path)
        training = config.training.model_copy(update={"max_nonfinite_steps": 2, "on_divergence": "rewind"})
        checkpoint = config.checkpoint.model_copy(update={"memory_every_steps": 1})
        runs[name] = config = config.model_copy(update={"training": training, "checkpoint": checkpoint})
        run_folder(config).path.mkdir(parents=True)
        for workers, spoiled, lost_in in parts:
            run = config.model_dump(), store_path
            worker_group.run(train_rank_with_faults, workers, run, tmp_path, spoiled, lost_in, workers=workers)
    lost_one = runs["lost one"]
    assert [event["checkpoint"] for event in events(lost_one, "resumed")] == ["step-00000004"]
    assert [event["step"] for event in events(lost_one, "rewound")] == [6]
    exported = exported_weights(lost_one)
    for name, weight in exported_weights(runs["kept"]).items():
        torch.testing.assert_close(exported[name], weight, rtol=1e-5, atol=1e-5)
    assert not [*tmp_path.glob("esmeray-*")], "copies of either number of workers are gone"
