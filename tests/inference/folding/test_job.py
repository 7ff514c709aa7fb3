"""Predicted structures are stored by sequence and predictor: they are reused, and interruptions do not change them.

Structures predicted during training give the same run as structures predicted before.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import EsmFold2Model

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.structures.predictions import PredictedStructures, keys
from esmeray.inference.folding import job
from esmeray.inference.folding.job import Folder, FoldingSettings, in_order, predict_structures, sequences_in_order
from esmeray.inference.folding.predictors import predictor
from esmeray.run_folder.metrics_log import read_metrics
from esmeray.tools.train._experiment import predicting_structures
from esmeray.training.config import Config
from tests.inference.embedding.jobs import write_proteins
from tests.model.support import random_sequences
from tests.runs import exported_weights, run_folder, train_losses
from tests.tasks.test_diffusion import diffusion_config
from tests.training.loop.test_worker import train

pytestmark = pytest.mark.slow

SEQUENCES = random_sequences([12, 30, 30, 7, 21, 12])
TRAINED = random_sequences([40, 25, 31, 60, 25, 44, 38, 52, 29, 33])


def contents(cache: Path) -> dict[str, bytes]:
    return {str(path.relative_to(cache)): path.read_bytes() for path in cache.rglob("*.safetensors")}


def predict(source: Path, cache: Path, sequences=SEQUENCES, kind: str = "esmfold", **options):
    settings = FoldingSettings(kind, str(source), cache, "cpu", cpus=1)
    return predict_structures(sequences, settings, **{"tokens": 45, "cache_bytes": 10**9, **options})


@pytest.mark.parametrize("kind", ["esmfold", "esmfold2"])
def test_structures_are_the_predictors_own_and_are_found_again(kind: str, tmp_path: Path, request):
    source = request.getfixturevalue(kind)
    first = predict(source, tmp_path, kind=kind)
    assert (first.sequences, first.cached) == (6, 0)
    model = predictor(kind, str(source), "cpu")
    folded = PredictedStructures(first.folder)
    kept = [found for each in keys(SEQUENCES)[:, None] if (found := folded.of(each)) is not None]
    for sequence, found in zip(SEQUENCES, kept, strict=True):
        (alone,) = model.predict([sequence])
        middle = alone.coordinates[:, 1].mean(0)
        np.testing.assert_allclose(found.coordinates, alone.coordinates - middle, atol=0.05)
        np.testing.assert_allclose(found.confidence, alone.confidence, atol=0.1)
    assert predict(source, tmp_path, [*SEQUENCES, SEQUENCES[0]], kind).cached == 6
    assert predict(source, tmp_path, [*SEQUENCES, "MKTAX"], kind).cached == 6


def test_esmfold2_gives_the_atoms_and_the_confidence_of_its_best_sample(esmfold2: Path):
    model = EsmFold2Model.from_pretrained(esmfold2).eval()
    model.confidence_head.plddt_weight.data.normal_()  # so that confidences differ by atom
    folding = predictor("esmfold2", str(esmfold2), "cpu")
    folding._model = model
    for sequence in SEQUENCES[:3]:
        torch.manual_seed(0)
        lines = model.infer_protein_as_pdb(sequence).splitlines()
        atoms = {(int(line[22:26]), line[12:16].strip()): line for line in lines if line.startswith("ATOM")}
        (found,) = folding.predict([sequence])
        for number in range(len(sequence)):
            for atom, name in enumerate(("N", "CA", "C", "O")):
                line = atoms[number + 1, name]
                wanted = [float(line[start : start + 8]) for start in (30, 38, 46)]
                np.testing.assert_allclose(found.coordinates[number, atom], wanted, atol=1e-3)
        torch.manual_seed(0)
        best = model.infer_protein(sequence)
        best = best["plddt_per_atom"][best["ptm"].argmax()]
        assert np.isin(found.confidence, 100 * best.numpy()).all() and len(set(found.confidence.tolist())) > 5


def test_a_job_that_was_ended_goes_on_to_the_same_cache(esmfold: Path, tmp_path: Path, monkeypatch):
    predict(esmfold, tmp_path / "whole")
    batches: list[list[str]] = []
    most = 1
    run = Folder.run

    def counting(self, batch):
        if len(batches) == most:
            raise KeyboardInterrupt
        batches.append(batch)
        return run(self, batch)

    monkeypatch.setattr(Folder, "run", counting)
    with pytest.raises(KeyboardInterrupt):
        predict(esmfold, tmp_path / "ended")
    most = len(SEQUENCES)
    predict(esmfold, tmp_path / "ended")
    assert sorted(text for batch in batches for text in batch) == sorted(SEQUENCES), "none is predicted twice"
    assert contents(tmp_path / "ended") == contents(tmp_path / "whole")


def test_the_cache_is_bounded_and_unknown_predictors_are_refused(esmfold: Path, tmp_path: Path):
    report = predict(esmfold, tmp_path, cache_bytes=1)
    assert report.removed_shards and not list(tmp_path.rglob("*.safetensors"))
    for source, kind, words in [
        (esmfold, "none", "^fold.predictor none: unknown predictor; available: .*esmfold"),
        (tmp_path, "esmfold", "can't be loaded as esmfold"),
        (esmfold, "esmfold2", r"can't be loaded as esmfold2 \(its config\.json does not describe a EsmFold2Model"),
    ]:
        with pytest.raises(ConfigError, match=words):
            predict(source, tmp_path, kind=kind)
    assert not PredictedStructures(tmp_path / "nothing").has(keys(SEQUENCES)).any()


def run(folder: Path, predictions: dict[str, Any]) -> tuple[Config, Path]:
    folder.mkdir(exist_ok=True)
    fasta = write_proteins(folder / "proteins.fasta", TRAINED)
    steps = {"max_steps": 4, "evaluate_every_steps": 2, "evaluation_batches": 1, "gpu_log_interval": 0.05}
    data = {"source": [str(fasta)], "max_length": 100, "predictions": predictions}
    batch = {"tokens": 128, "global_tokens": 128}
    config, path = diffusion_config(folder, data=data, batch=batch, training=steps)
    return config, Path(path)


def test_training_waits_for_structures_and_is_the_same_to_the_bit(
    tmp_path: Path, esmfold: Path, ray_address: str, process_group, monkeypatch: pytest.MonkeyPatch
):
    warm, path = run(tmp_path / "warm", {"folder": str(tmp_path / "before"), "on_miss": "null"})
    sections = warm.data, warm.model.diffusion, warm.batch, warm.training
    sequences = sequences_in_order(path, *sections, warm.run.seed)
    assert sorted(sequences) == sorted(set(TRAINED))
    before = FoldingSettings("esmfold", str(esmfold), tmp_path / "before", "cpu", cpus=1)
    monkeypatch.setattr(job, "_BATCH_RESIDUES", 64)
    predict_structures(sequences, before, tokens=64, cache_bytes=None, plan=in_order)
    train(warm, str(path))
    cold, path = run(tmp_path / "cold", {"folder": str(tmp_path / "ahead"), "on_miss": "wait", "model": str(esmfold)})
    with predicting_structures(cold, path) as of_workers:
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


@pytest.mark.usefixtures("ray_address", "process_group")
def test_a_predictor_that_fails_ends_what_waits_for_it(tmp_path: Path, esmfold: Path, monkeypatch):
    monkeypatch.setattr(job, "actors", InThisProcess)
    broken = shutil.copytree(esmfold, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights = {name: tensor * torch.nan if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    settings = {"folder": str(tmp_path / "none"), "on_miss": "wait", "model": str(broken)}
    config, path = run(tmp_path / "run", settings)
    with (
        predicting_structures(config, path) as of_workers,
        pytest.raises(DataError, match="predicting structures failed"),
    ):
        train(of_workers, str(path))
