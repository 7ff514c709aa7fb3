"""Structures predicted during training give the same run as structures predicted before."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from esmeray.common.errors import DataError
from esmeray.inference.folding import job
from esmeray.inference.folding.job import Folder, FoldingSettings, in_order, predict_structures, sequences_in_order
from esmeray.run_folder.metrics_log import read_metrics
from esmeray.tools.train._experiment import beside
from esmeray.training.config import Config
from tests.inference.embedding.jobs import write_proteins
from tests.model.support import random_sequences
from tests.runs import exported_weights, run_folder, train_losses
from tests.tasks.test_diffusion import diffusion_config
from tests.training.loop.test_worker import train

SEQUENCES = random_sequences([40, 25, 31, 60, 25, 44, 38, 52, 29, 33])


def run(folder: Path, predictions: dict[str, Any]) -> tuple[Config, Path]:
    folder.mkdir(exist_ok=True)
    fasta = write_proteins(folder / "proteins.fasta", SEQUENCES)
    steps = {"max_steps": 4, "evaluate_every_steps": 2, "evaluation_batches": 1, "gpu_log_interval": 0.05}
    data = {"source": [str(fasta)], "max_length": 100, "predictions": predictions}
    batch = {"tokens": 128, "global_tokens": 128}
    config, path = diffusion_config(folder, data=data, batch=batch, training=steps)
    return config, Path(path)


@pytest.mark.slow
def test_training_waits_for_structures_and_is_the_same_to_the_bit(
    tmp_path: Path, esmfold: Path, ray_address: str, process_group, monkeypatch: pytest.MonkeyPatch
):
    warm, path = run(tmp_path / "warm", {"folder": str(tmp_path / "before"), "on_miss": "null"})
    sections = warm.data, warm.model.diffusion, warm.batch, warm.training
    sequences = sequences_in_order(path, *sections, warm.run.seed)
    assert sorted(sequences) == sorted(set(SEQUENCES))
    before = FoldingSettings("esmfold", str(esmfold), tmp_path / "before", "cpu", cpus=1)
    monkeypatch.setattr(job, "_BATCH_RESIDUES", 64)
    predict_structures(sequences, before, tokens=64, cache_bytes=None, plan=in_order)
    train(warm, str(path))
    cold, path = run(tmp_path / "cold", {"folder": str(tmp_path / "ahead"), "on_miss": "wait", "model": str(esmfold)})
    with beside(cold, path) as of_workers:
        train(of_workers, str(path))
    assert train_losses(cold) == train_losses(warm)
    assert all((exported_weights(cold)[name] == value).all() for name, value in exported_weights(warm).items())
    samples = read_metrics(run_folder(cold).monitoring / "worker-00000.jsonl")
    assert 0 < samples[-1]["metrics"]["data/worker/0/feature_cache_hit_rate"] < 1


class InThisProcess(Folder):
    """A folder that replaces actors, which take seconds to start."""

    def __init__(self, settings: FoldingSettings, *_: Any, **__: Any) -> None:
        super().__init__(settings)
        self.loaded = self.load()

    def run(self, batches: Any) -> Any:
        return map(super().run, batches)

    def close(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("ray_address", "process_group")
def test_a_predictor_that_fails_ends_what_waits_for_it(tmp_path: Path, esmfold: Path, monkeypatch):
    monkeypatch.setattr(job, "actors", InThisProcess)
    broken = shutil.copytree(esmfold, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights = {name: tensor * torch.nan if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    settings = {"folder": str(tmp_path / "none"), "on_miss": "wait", "model": str(broken)}
    config, path = run(tmp_path / "run", settings)
    with beside(config, path) as of_workers, pytest.raises(DataError, match="predicting structures failed"):
        train(of_workers, str(path))
