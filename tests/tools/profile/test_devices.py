"""``esmeray profile devices`` on a machine without a GPU."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.inference.embedding.jobs import small_model_folder, write_proteins
from tests.model.support import random_sequences
from tests.tools.conftest import small_measurements


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    small_measurements(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    models = [str(small_model_folder(tmp_path / name)) for name in ("first", "second")]
    fasta = write_proteins(tmp_path / "proteins.fasta", random_sequences([9, 30, 60, 9, 90]))
    options = ["--profile.models", *models, "--data.source", str(fasta), "--profile.output", str(tmp_path / "out")]
    return ["profile", "devices", *options]


def test_without_a_gpu_the_precisions_of_the_cpu_are_compared(command, given: list[str], tmp_path: Path):
    outcome = command.done(*given)
    assert outcome.out.count("no GPU found") == 1
    models = json.loads((tmp_path / "out" / "devices.json").read_text())["models"]
    assert [Path(model["model"]).name for model in models] == ["first", "second"]
    for model in models:
        assert model["proteins"] == 4 and list(model["devices"]) == ["CPU fp32", "CPU bf16"]
        assert all(len(device["residues_per_s"]) == 2 for device in model["devices"].values())
        assert model["speed_up"]["low"] <= model["speed_up"]["value"] <= model["speed_up"]["high"]
        fp32, bf16 = (np.array(device["proteins_per_s"]) for device in model["devices"].values())
        assert model["speed_up"]["value"] == pytest.approx(np.median(bf16 / fp32))
        found = model["agreement"]
        assert 0.995 < found["lowest_cosine"] <= found["mean_cosine"] < 1.0001
        assert 0 < found["largest_relative_difference"] < 0.1
