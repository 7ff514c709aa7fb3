from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from esmeray.cluster.collective import WorkerContext
from esmeray.tools.train.export import main as export
from esmeray.train_config.loading import dump_config
from esmeray.training.config import Config
from esmeray.training.loop.worker import train_worker
from tests.runs import exported_weights, run_folder, tiny_config, train_losses
from tests.worker_group import WorkerGroup


def train_rank(rank: int, config: dict, store_path: str) -> None:
    train_worker(Config.model_validate(config), WorkerContext(rank, 2, rank), store_path)


def train_with(workers: int, config: Config, store_path: str, group: WorkerGroup) -> None:
    (Path(config.run.storage_path) / config.run.name).mkdir(parents=True, exist_ok=True)
    if workers == 1:
        train_worker(config, WorkerContext(), store_path)
    else:
        group.run(train_rank, config.model_dump(), store_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "batches_per_step"), [("masked_lm", 2), ("autoencoder", 3)], ids=["masked_lm", "autoencoder with a filler"]
)
def test_two_workers_match_one(task, batches_per_step, store_path, tmp_path, process_group, worker_group):
    changes = {
        "model": {"task": task},
        "batch": {"global_tokens": 256 * batches_per_step},
        "training": {"max_steps": 6},
    }
    runs = {workers: tiny_config(tmp_path / str(workers), **changes) for workers in (1, 2)}
    for workers, config in runs.items():
        train_with(workers, config, store_path, worker_group)
    one, two = train_losses(runs[1]), train_losses(runs[2])
    assert len(one) == 6
    assert two == pytest.approx(one, rel=1e-5)
    expected, actual = exported_weights(runs[1]), exported_weights(runs[2])
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-5)
    assert_shards_make_the_exported_weights(runs[2], tmp_path / "from-shards")


def assert_shards_make_the_exported_weights(config: Config, folder: Path) -> None:
    run = run_folder(config)
    run.config.write_text(dump_config(config))
    export([str(run.path), "--export.output", str(folder)])
    for path in run.export.glob("*.safetensors"):
        expected, actual = load_file(path), load_file(folder / path.name)
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
