"""Sequence diffusion uses the common training loop and learns from the fold, with any number of workers."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esmeray.common.errors import ConfigError
from esmeray.dataset.structures.store import Structure, StructureStore
from esmeray.inference.design.denoising import Denoiser
from esmeray.inference.design.sampling import Request, generate
from esmeray.model.section import StructureEncoderSection
from esmeray.tasks.diffusion.data import StructureSource
from esmeray.tasks.diffusion.model import open_diffusion
from esmeray.tasks.plan import task_plan
from esmeray.training.config import Config
from tests.runs import merged, run_folder, tiny_config, validations
from tests.structures import folds, pdb_lines, save_proteinmpnn, write_pdb
from tests.training.runs import assert_same_run, prepared, stop_after, train

pytestmark = pytest.mark.slow

DIFFUSION = {
    "data": {"max_length": 150, "sample": {"records": 40}, "validation_share": 0.2},
    "model": {
        "task": "diffusion",
        "backbone": {"hidden_size": 32, "heads": 4},
        "diffusion": {"encoder": {"hidden_size": 32, "layers": 1, "neighbours": 12, "dropout": 0.0}, "noise": 0.02},
    },
}


def diffusion_config(folder: Path, **changes: Any) -> tuple[Config, str]:
    """Config of a run, and the path of its structure store."""
    config = tiny_config(folder, **merged(DIFFUSION, changes))
    return config, str(prepared(config))


def test_it_learns_what_the_fold_says_and_its_export_opens(process_group, tmp_path: Path):
    changes = {"training": {"max_steps": 26, "evaluate_every_steps": 13, "learning_rate": 7e-3}}
    config, path = diffusion_config(tmp_path, **changes)
    train(config, path)
    first, *_, last = validations(config)
    assert last["loss"] < first["loss"] and last["loss"] < last["unconditional_loss"] - 0.1
    assert last["residue_recovery"] > 0.15
    model = open_diffusion(run_folder(config).export)
    assert model.section == config.model.diffusion


def test_a_least_confidence_is_refused_of_structures_without_one(tmp_path: Path):
    lines = [line[:60] + f"{50 + int(line[22:26]) / 10:6.2f}" + line[66:] for line in pdb_lines(folds(1)[0])]
    path = write_pdb(tmp_path / "rank_1.pdb", lines)
    changes: dict[str, Any] = {"data": {"source": [str(path)]}, "model": {"diffusion": {"min_confidence": 52.0}}}
    with pytest.raises(
        ConfigError, match=r"min_confidence 52: no structure .* set data\.structures\.predicted to true"
    ):
        diffusion_config(tmp_path / "measured", **changes)
    changes["data"]["structures"] = {"predicted": True}
    config, store = diffusion_config(tmp_path / "predicted", **changes)
    size = task_plan(config.data, config.model).measure(Path(store)).data
    assert size.counts is not None and "1 structure read as predictions" in size.counts.lines()[0]
    source = StructureSource(StructureStore(store), config.model.diffusion, max_length=150, seed=0, training=False)
    coordinates = source.batch(0, np.array([0])).batch.by_token["coordinates"]
    assert coordinates[:, 1, 0].isnan().nonzero()[:-1].flatten().tolist() == list(range(20))


def test_a_stopped_run_resumes_in_a_loader_process_to_the_same_end(tmp_path: Path, process_group, loader_processes):
    whole, path = diffusion_config(tmp_path / "whole")
    stopped, _ = diffusion_config(tmp_path / "stopped")
    resumed, _ = diffusion_config(tmp_path / "stopped", data={"num_workers": 1})
    assert train(whole, path).status == "finished"
    stop_after(stopped, path, 4)
    train(resumed, path)
    assert_same_run(resumed, whole)
    assert len(loader_processes) == 1


def test_a_run_from_trained_weights_resumes_to_the_same_end(tmp_path: Path, process_group, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    encoder = {"source": str(save_proteinmpnn(tmp_path / "own.pt")), "frozen": True}
    sizes = {
        name: StructureEncoderSection.model_fields[name].default for name in DIFFUSION["model"]["diffusion"]["encoder"]
    }
    model = {"diffusion": {"encoder": {**sizes, **encoder}}}
    whole, path = diffusion_config(tmp_path / "whole", model=model)
    stopped, _ = diffusion_config(tmp_path / "stopped", model=model)
    train(whole, path)
    stop_after(stopped, path, 4)
    train(stopped, path)
    assert_same_run(stopped, whole)


def test_sequences_of_a_class_are_written_and_guidance_makes_more_of_it(tmp_path: Path, process_group):
    """Peptides have two classes: one is rich in lysine, the other in aspartate."""
    draw = random.Random(0)
    rows = [(f"p{number}", "KD"[number % 2]) for number in range(80)]
    texts = ["".join(draw.choices("AGLS" + 8 * letter, k=draw.randint(15, 30))) for _, letter in rows]
    fasta, labels = tmp_path / "peptides.fasta", tmp_path / "labels.csv"
    fasta.write_text("".join(f">{name}\n{text}\n" for (name, _), text in zip(rows, texts, strict=True)))
    labels.write_text("id,label\n" + "".join(f"{name},{label}\n" for name, label in rows))
    data = {"source": [str(fasta)], "structures": {"labels": str(labels)}}
    config, path = diffusion_config(
        tmp_path, data=data, training={"max_steps": 30, "evaluate_every_steps": 30, "learning_rate": 1e-2}
    )
    train(config, path)
    model = open_diffusion(run_folder(config).export)
    assert model.labels == ("D", "K")
    nothing = Structure.unknown("free", "X" * 20)
    shares = []
    for guidance in (0.0, 1.0, 3.0):
        asked = Request(nothing, label=1, temperature=1.0, steps=10, guidance=guidance)
        shares.append(sum(design.residues.count("K") for design in generate(Denoiser(model), [asked], 10)) / 200)
    assert min(shares[1:]) > shares[0] + 0.5
