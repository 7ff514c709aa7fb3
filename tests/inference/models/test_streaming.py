"""Layers that are read as they are needed give the same bytes as those in memory, and few are there at any time."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from esmeray.common.errors import ConfigError, DataError
from esmeray.inference.embedding.job import run_job
from esmeray.inference.models import model as inference_model
from esmeray.inference.models import opening
from esmeray.inference.models.model import Model, run
from esmeray.inference.models.opening import open_model
from esmeray.model.backbones.huggingface_loading import quiet_transformers
from esmeray.model.backbones.streaming import StoredTensor, StreamedLayers
from esmeray.monitoring.sampling.host import Memory
from tests.dataset.tokenizer_folders import esm
from tests.inference.embedding.jobs import final_bytes, partial, replace, request
from tests.inference.models.opened import opened
from tests.model.small_models import save_masked_lm
from tests.model.support import random_sequences

LAYERS, TENSORS = 4, 16
"""Of the small model, and of each of its layers."""
SEQUENCES = random_sequences([7, 31, 1, 90, 18, 55, 40, 12, 77, 3])
BUDGET = 100
"""Of a batch: the sequences make four."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = esm(tmp_path / "model")
    with quiet_transformers():
        save_masked_lm(path, "esm", vocab_size=33, num_hidden_layers=LAYERS)
    return path


def arrays(model: Model, outputs: list[str], layers: list[int]) -> list[dict[str, NDArray]]:
    return [dict(batch.arrays) for batch in run(model, SEQUENCES, model.outputs(outputs, layers), BUDGET)]


def assert_equal(first: Model, second: Model) -> None:
    """The fingerprint, and the bytes of all outputs of layers and of windows."""
    assert first.facts.fingerprint == second.facts.fingerprint
    found, wanted = (arrays(model, ["mean", "residues", "logits"], [0, 2, -1]) for model in (first, second))
    assert len(found) == len(wanted) == 4
    for ours, theirs in zip(found, wanted, strict=True):
        for name, rows in theirs.items():
            assert np.array_equal(ours[name], rows), name
    windows = [
        model.rows_over_windows(
            SEQUENCES[3].encode(), model.outputs(["mean"]), length=20, overlap=5, token_budget=BUDGET
        )["mean"]
        for model in (first, second)
    ]
    assert torch.equal(*windows)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_streamed_results_equal_those_of_layers_in_memory(folder: Path, precision: str, monkeypatch):
    streamed, resident = (opened(folder, precision=precision, stream=stream) for stream in (True, False))
    assert streamed.facts.streamed and not resident.facts.streamed
    assert_equal(streamed, resident)
    monkeypatch.setattr(inference_model, "STREAMED_TOKENS", 2 * BUDGET)  # more than one pass over the layers
    assert_equal(streamed, resident)


def test_weights_in_several_files_and_in_16_bits_are_streamed(folder: Path):
    network = save_masked_lm(folder, "esm", vocab_size=33, num_hidden_layers=LAYERS).bfloat16()
    (folder / "model.safetensors").unlink()
    network.save_pretrained(folder, max_shard_size="20KB")
    assert len([*folder.glob("model-*.safetensors")]) > 2
    assert_equal(opened(folder, stream=True), opened(folder, stream=False))


def test_a_layer_is_read_once_for_many_batches_and_few_are_in_memory(folder: Path, monkeypatch):
    model = opened(folder, stream=True)
    reads: list[StoredTensor] = []
    layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    most = 0
    read, make = StoredTensor.read, StreamedLayers._layer

    def counted(self: StoredTensor, **settings: Any) -> Any:
        reads.append(self)
        return read(self, **settings)

    def made(self: StreamedLayers, *arguments: Any) -> nn.Module:
        nonlocal most
        layer = make(self, *arguments)
        layers.add(layer)
        most = max(most, len(layers))
        return layer

    monkeypatch.setattr(StoredTensor, "read", counted)
    monkeypatch.setattr(StreamedLayers, "_layer", made)
    arrays(model, ["mean"], [-1])
    assert len(reads) == LAYERS * TENSORS == len(set(reads))
    gc.collect()
    assert most <= 3 and not layers


def test_what_cannot_be_streamed_is_refused(folder: Path):
    with pytest.raises(ConfigError, match="model: stream true needs an ESM-2"):
        opened("esm2_t6_8M", random_weights=True, stream=True)
    model = opened(folder, stream=True)
    with pytest.raises(ConfigError, match="outputs contacts: this model has none while its layers are streamed"):
        model.outputs(["contacts"])
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 50_000)
    with pytest.raises(DataError, match="has become shorter"):
        arrays(model, ["mean"], [-1])
    with pytest.raises(DataError, match="fetch or export them again"):
        opened(folder, stream=True)


def test_weights_that_a_layer_lacks_or_that_have_another_shape_are_named(folder: Path):
    whole, key = load_file(folder / "model.safetensors"), "encoder.layer.3.output.dense.bias"
    without = {name: tensor for name, tensor in whole.items() if name != f"esm.{key}"}
    for weights, message in (without, f"lack {key}"), ({**whole, f"esm.{key}": torch.zeros(8)}, f"shape .* at {key}"):
        save_file(weights, folder / "model.safetensors")
        with pytest.raises(DataError, match=message):
            opened(folder, stream=True)


def test_layers_are_streamed_by_default_where_memory_does_not_hold_them(folder: Path, monkeypatch):
    assert not opened(folder).facts.streamed
    monkeypatch.setattr(opening, "memory_of_this_machine", lambda: Memory(2**30, 10_000))
    assert opened(folder).facts.streamed
    assert not opened(folder, stream=False).facts.streamed


def test_a_job_is_the_same_whether_layers_are_streamed_or_not(folder: Path, tmp_path: Path):
    job = request(tmp_path, stream=False, outputs=["mean", "residues"])
    run_job(job)
    other = replace(job, output=tmp_path / "other", stream=True)
    run_job(other)
    assert final_bytes(job.output) == final_bytes(other.output)
    run_job(replace(job, stream=True))  # the finished output is known as this job's
    assert not partial(job).exists()


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_are_copied_to_a_gpu_while_it_computes(folder: Path, precision: Any):
    streamed, resident = (open_model(folder, precision, "cuda", stream=stream) for stream in (True, False))
    for _ in range(3):  # the first pass reads the files, the others pinned memory
        assert_equal(streamed, resident)
