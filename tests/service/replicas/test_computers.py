"""Answers equal the offline model's and classifier's, whatever else was in their batch."""

import functools
import os
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.inference.models.model import Model, run
from esmeray.service.replicas.computer import Computer
from esmeray.service.section import ServedModel
from esmeray.tasks.autoencoder.model import ESM2Autoencoder
from tests.inference.models.opened import opened
from tests.model.support import LETTERS, random_sequences
from tests.service.serving import PRECISION, Serving

MIXES = int(os.environ.get("ESMERAY_MIXES", "25"))
OUTPUTS = ["mean", "max", "cls", "residues", "logits"]


@functools.cache
def offline(folder: Path) -> Model:
    return opened(folder)


@functools.cache
def alone(folder: Path, output: str, sequence: str) -> np.ndarray:
    """The offline model's output for one sequence, maybe with a mask."""
    (wanted,) = offline(folder).outputs([output])
    (batch,) = run(offline(folder), [sequence], [wanted])
    return batch.arrays[output][0] if wanted.per == "protein" else batch.arrays[output]


def near(values: np.ndarray, wanted: np.ndarray) -> None:
    assert values.shape == wanted.shape and values.dtype == np.float32
    np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@functools.cache
def computer(folder: Path) -> Computer:
    return Computer(ServedModel(name=folder.name, source=str(folder), **PRECISION), "cpu")


SEQUENCES = st.builds(lambda length, seed: random_sequences([length], seed)[0], st.integers(1, 30), st.integers(0, 3))
ASKED = st.tuples(st.sampled_from([*OUTPUTS, "masked"]), SEQUENCES, st.integers(0, 29))


@settings(max_examples=MIXES, deadline=None)
@given(asked=st.lists(ASKED, min_size=1, max_size=8))
def test_any_mix_of_outputs_equals_the_offline_model(serving: Serving, asked: list[tuple[str, str, int]]):
    folder = serving.folder / "esm"
    items, wanted = [], []
    for output, sequence, index in asked:
        masked = index % len(sequence)
        is_masked = output == "masked"
        text = f"{sequence[:masked]}<mask>{sequence[masked + 1 :]}" if is_masked else sequence
        items += computer(folder).items(output, [text])
        wanted.append(alone(folder, "logits", text)[masked, None] if is_masked else alone(folder, output, text))
    for values, wanted_values in zip(computer(folder).compute(items), wanted, strict=True):
        near(values, wanted_values)


def test_latents_are_decoded_to_what_the_autoencoder_itself_gives(serving: Serving):
    folder = serving.folder / "autoencoder"
    served, texts = computer(folder), random_sequences([9, 1, 30])
    latents = served.compute(served.items("latents", texts))
    model = ESM2Autoencoder.from_pretrained(folder)
    for values, wanted in zip(latents, model.encode(texts), strict=True):
        near(values, wanted.numpy())
    first, *others = served.items("decoded", latents)
    decoded, _, *more = served.compute([first, *served.items("mean", ["MKT"]), *others])
    logits = model.decode([torch.from_numpy(values) for values in latents])[1]
    for values, wanted in zip([decoded, *more], logits, strict=True):
        near(values, wanted.numpy())


def test_embeds_cache_is_read(serving: Serving, tmp_path: Path):
    from esmeray.inference.embedding.job import run_job
    from tests.inference.embedding.jobs import request, write_proteins

    sequence, folder = LETTERS * 2, serving.folder / "esm"
    write_proteins(tmp_path / "proteins.fasta", [sequence])
    (tmp_path / "model").symlink_to(folder)
    run_job(request(tmp_path, outputs=["mean", "residues"], cache=tmp_path / "cache", cache_gb=1))
    model = ServedModel(name="esm", source=str(folder), cache=str(tmp_path / "cache"), **PRECISION)
    served = Computer(model, "cpu")
    served._model.rows = None  # type: ignore[method-assign,assignment]  # cached results need no model
    for output in ("mean", "residues"):
        (values,) = served.compute(served.items(output, [sequence]))
        near(values, alone(folder, output, sequence))
