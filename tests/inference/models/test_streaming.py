"""Streamed layers give the same bytes as layers in memory, with few layers in memory at a time.

Int8 weights count as another model; they halve the bytes that are read or held.
"""

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
from esmeray.common.publishing import MADE_FILE
from esmeray.dataset.embeddings.reader import read_embeddings
from esmeray.dataset.section import IngestSection
from esmeray.dataset.tokens.model_folder import quiet_transformers
from esmeray.inference.embedding.job import run_job
from esmeray.inference.index.build import IndexSection, make_index
from esmeray.inference.index.search import open_index, opened_queries
from esmeray.inference.models import model as inference_model
from esmeray.inference.models import opening
from esmeray.inference.models.model import Model, run
from esmeray.inference.models.opening import open_model
from esmeray.model.backbones.streaming import StoredTensor, StreamedLayers
from esmeray.monitoring.sampling.host import Memory
from tests.damage import refuse_silence
from tests.dataset.tokenizer_folders import esm
from tests.inference.embedding.jobs import final_bytes, partial, replace, request
from tests.inference.models.opened import opened
from tests.model.small_models import save_masked_lm
from tests.model.support import random_sequences

pytestmark = pytest.mark.slow

LAYERS = 4
"""Number of layers of the small model."""
SEQUENCES = random_sequences([7, 31, 1, 90, 18, 55, 40, 12, 77, 3])
BUDGET = 100
"""Token budget of a batch; the sequences fill four batches."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder to which int8 copies are written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/esmeray/storage/files"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = esm(tmp_path / "model")
    with quiet_transformers():
        save_masked_lm(path, "esm", vocab_size=33, num_hidden_layers=LAYERS)
    return path


def arrays(model: Model, outputs: list[str], layers: list[int]) -> list[dict[str, NDArray]]:
    return [dict(batch.arrays) for batch in run(model, SEQUENCES, model.outputs(outputs, layers), BUDGET)]


def assert_equal(first: Model, second: Model) -> None:
    """Check that fingerprints and the bytes of all outputs, by layer and by window, are equal."""
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
    """With 8-bit weights, less than half of the bytes are read, also of weights in 16 bits."""
    network = save_masked_lm(folder, "esm", vocab_size=33, num_hidden_layers=LAYERS, hidden_size=64).bfloat16()
    network.save_pretrained(folder)
    num_bytes: dict[StoredTensor, int] = {}
    layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    most = 0
    read, make = StoredTensor.read, StreamedLayers._layer

    def counted(self: StoredTensor, **settings: Any) -> Any:
        assert self not in num_bytes
        tensor = read(self, **settings)
        num_bytes[self] = tensor.nbytes
        return tensor

    def made(self: StreamedLayers, *arguments: Any) -> nn.Module:
        nonlocal most
        layer = make(self, *arguments)
        layers.add(layer)
        most = max(most, len(layers))
        return layer

    totals = {}
    for weights in ("stored", "int8"):
        model = opened(folder, stream=True, weights=weights)
        num_bytes.clear()
        with monkeypatch.context() as patched:
            patched.setattr(StoredTensor, "read", counted)
            patched.setattr(StreamedLayers, "_layer", made)
            arrays(model, ["mean"], [-1])
        totals[weights] = sum(num_bytes.values())
        gc.collect()
        assert most <= 3 and not layers
    # With this few channels, scales and norms are a tenth of the bytes.
    assert totals["int8"] < 0.6 * totals["stored"]


def test_what_cannot_be_streamed_is_refused(folder: Path):
    with pytest.raises(ConfigError, match="model: stream true supports only ESM-2"):
        opened("esm2_t6_8M", random_weights=True, stream=True)
    model = opened(folder, stream=True)
    with pytest.raises(
        ConfigError, match="outputs contacts: not available for this model while its layers are streamed"
    ):
        model.outputs(["contacts"])
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 50_000)
    with pytest.raises(DataError, match="was truncated after"):
        arrays(model, ["mean"], [-1])
    with pytest.raises(DataError, match="fetch or export them again"):
        opened(folder, stream=True)


def test_weights_that_a_layer_lacks_or_that_have_another_shape_are_named(folder: Path):
    whole, key = load_file(folder / "model.safetensors"), "encoder.layer.3.output.dense.bias"
    without = {name: tensor for name, tensor in whole.items() if name != f"esm.{key}"}
    for weights, message in (without, f"lack {key}"), ({**whole, f"esm.{key}": torch.zeros(8)}, f"shape .* for {key}"):
        save_file(weights, folder / "model.safetensors")
        with pytest.raises(DataError, match=message):
            opened(folder, stream=True)


def test_layers_are_streamed_by_default_where_memory_does_not_hold_them(folder: Path, monkeypatch):
    assert not opened(folder).facts.streamed
    monkeypatch.setattr(opening, "memory_of_this_machine", lambda: Memory(2**30, 10_000))
    assert opened(folder).facts.streamed
    assert not opened(folder, stream=False).facts.streamed


def rounded(folder: Path) -> None:
    """Round the linear weights of the layers to int8 values, in place and stored as fp32."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if "encoder.layer." in name and tensor.ndim == 2:
            values_OI = tensor.numpy()
            scales_O1 = np.abs(values_OI).max(axis=1, keepdims=True) / 127
            # 0 is added, as int8 has no -0.
            weights[name] = torch.from_numpy((np.rint(values_OI / scales_O1) + 0) * scales_O1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_of_8_bits_give_the_bytes_of_rounded_ones_read_and_held(folder: Path, precision: str):
    read, held = (opened(folder, precision=precision, weights="int8", stream=stream) for stream in (True, False))
    stored = opened(folder, precision=precision)
    assert read.facts.fingerprint != stored.facts.fingerprint
    vectors, wanted = (model.embed(SEQUENCES).astype(np.float64) for model in (read, stored))
    cosines = (vectors * wanted).sum(1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(wanted, axis=1)
    # The error of a weight is at most 1/254 of its channel's maximum; vectors have about the mean error.
    assert cosines.min() > 0.999 and not np.array_equal(vectors, wanted)
    assert_equal(read, held)
    rounded(folder)
    assert_equal(read, opened(folder, precision=precision))
    batches = [held.embed([sequence]) for sequence in SEQUENCES]
    assert np.array_equal(np.concatenate(batches), held.embed(SEQUENCES)), "whatever shares the batch"


def test_a_copy_of_8_bits_is_verified_and_made_anew_of_other_weights(folder: Path, cache: Path):
    first = opened(folder, weights="int8").facts.fingerprint
    (copy,) = cache.glob("*/")
    for path in copy / MADE_FILE, copy / "model.safetensors.index.json", *sorted(copy.glob("*3.output.dense.*")):
        refuse_silence(path, lambda: opened(folder, stream=True, weights="int8").embed(SEQUENCES).tolist(), count=4)
    weights = load_file(folder / "model.safetensors")
    name = "esm.encoder.layer.1.output.dense.weight"
    save_file(weights | {name: 2 * weights[name]}, folder / "model.safetensors")
    assert opened(folder, weights="int8").facts.fingerprint != first
    save_file(weights | {name: torch.full_like(weights[name], torch.inf)}, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"layer\.1\.output\.dense\.weight contain NaN or infinity"):
        opened(folder, weights="int8")
    assert len([*cache.glob("*/")]) == 2, "no part of a copy stays"
    with pytest.raises(ConfigError, match="model: weights int8 supports only ESM-2"):
        opened("esm2_t6_8M", random_weights=True, weights="int8")


def test_vectors_of_8_bits_are_those_of_streamed_layers(folder: Path, tmp_path: Path):
    job = request(tmp_path, stream=False, weights="int8")
    run_job(job)
    other = replace(job, output=tmp_path / "other", stream=True)
    run_job(other)
    assert final_bytes(job.output) == final_bytes(other.output)
    run_job(replace(job, stream=True))  # the finished output is recognized as this job's
    assert not partial(job).exists()
    assert read_embeddings(job.output).manifest.job["settings"]["weights"] == "int8"
    with pytest.raises(ConfigError, match="of another job"):
        run_job(replace(job, weights="stored"))
    stored = replace(job, weights="stored", output=tmp_path / "stored")
    run_job(stored)
    with pytest.raises(ConfigError, match="of another job"):
        run_job(replace(stored, weights="int8"))
    with pytest.raises(ConfigError, match="its values can't be reused"):
        run_job(replace(stored, known=[str(job.output)], output=tmp_path / "known"))
    with pytest.raises(DataError, match="give embeddings of the same model"):
        make_index([job.output, stored.output], IndexSection(output=tmp_path / "index"))
    make_index([job.output], IndexSection(output=tmp_path / "index"))
    queries = opened_queries(Path(job.input[0]), open_index(tmp_path / "index").manifest, IngestSection())
    with queries as vectors:
        assert np.array_equal(vectors[:], read_embeddings(job.output)[:]), "queries are embedded as the index was"


@pytest.mark.cuda
@pytest.mark.parametrize("weights", ["stored", "int8"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_are_copied_to_a_gpu_while_it_computes(folder: Path, precision: Any, weights: Any):
    streamed, resident = (
        open_model(folder, precision, "cuda", stream=stream, weights=weights) for stream in (True, False)
    )
    for _ in range(3):  # the first pass reads the files, the others pinned memory
        assert_equal(streamed, resident)
