"""Answers equal those of the offline model and classifier, whatever shared their batch."""

import functools
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.inference.models.model import Model
from esmeray.model.tasks.autoencoder import ESM2Autoencoder
from esmeray.service.replicas.computer import Computer
from esmeray.service.section import ServedModel
from tests.inference.models.opened import opened, rows_of
from tests.model.support import LETTERS, random_sequences
from tests.service.serving import PRECISION, Serving

MIXES = int(os.environ.get("ESMERAY_MIXES", "25"))
OUTPUTS = ["mean", "max", "cls", "residues", "logits"]


@functools.cache
def offline(folder: Path) -> Model:
    return opened(folder)


@functools.cache
def alone(folder: Path, output: str, sequence: str) -> np.ndarray:
    """The offline model's, of one sequence by itself."""
    found = rows_of(offline(folder), [sequence], [output])[output].numpy()
    return found if output in ("residues", "logits") else found[0]


@functools.cache
def in_transformers(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    return AutoTokenizer.from_pretrained(folder), AutoModelForMaskedLM.from_pretrained(folder).eval()


@functools.cache
def masked_alone(folder: Path, sequence: str, places: tuple[int, ...]) -> np.ndarray:
    """Transformers' logits of the masked places."""
    tokenizer, model = in_transformers(folder)
    text = "".join("<mask>" if place in places else letter for place, letter in enumerate(sequence))
    with torch.no_grad():
        logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
    return logits[[place + 1 for place in places]].numpy()


def near(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape and found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@functools.cache
def computer(name: str, folder: Path) -> Computer:
    return Computer(ServedModel(name=name, source=str(folder), **PRECISION), "cpu")


SEQUENCES = st.builds(lambda length, seed: random_sequences([length], seed)[0], st.integers(1, 30), st.integers(0, 3))
ONE = st.tuples(st.sampled_from([*OUTPUTS, "masked"]), SEQUENCES, st.integers(0, 29))


@settings(max_examples=MIXES, deadline=None)
@given(asked=st.lists(ONE, min_size=1, max_size=8))
def test_any_mix_of_outputs_equals_the_offline_model(serving: Serving, asked: list[tuple[str, str, int]]):
    folder = serving.folder / "esm"
    served = computer("esm", folder)
    items = []
    for output, sequence, place in asked:
        place %= len(sequence)
        text = f"{sequence[:place]}<mask>{sequence[place + 1 :]}" if output == "masked" else sequence
        items += served.items(output, [text])
    for (output, sequence, place), found in zip(asked, served.compute(items), strict=True):
        if output == "masked":
            near(found, masked_alone(folder, sequence, (place % len(sequence),)))
        else:
            near(found, alone(folder, output, sequence))


def test_latents_are_decoded_to_what_the_autoencoder_itself_gives(serving: Serving):
    folder = serving.folder / "autoencoder"
    served, texts = computer("autoencoder", folder), random_sequences([9, 1, 30])
    latents = served.compute(served.items("latents", texts))
    model = ESM2Autoencoder.from_pretrained(folder)
    for found, wanted in zip(latents, model.encode(texts), strict=True):
        near(found, wanted.numpy())
    items = served.items("decoded", latents)
    mixed = served.compute([items[0], *served.items("mean", ["MKT"]), *items[1:]])
    for found, wanted in zip(
        [mixed[0], *mixed[2:]], model.decode([torch.from_numpy(each) for each in latents])[1], strict=True
    ):
        near(found, wanted.numpy())


def test_embeds_cache_is_read(serving: Serving, tmp_path: Path):
    from esmeray.inference.embedding.job import run_job
    from tests.inference.embedding.jobs import request, write_proteins

    sequence = LETTERS * 2
    write_proteins(tmp_path / "proteins.fasta", [sequence])
    (tmp_path / "model").symlink_to(serving.folder / "esm")
    run_job(request(tmp_path, outputs=["mean", "residues"], cache=tmp_path / "cache", cache_gb=1))
    model = ServedModel(name="esm", source=str(serving.folder / "esm"), cache=str(tmp_path / "cache"), **PRECISION)
    served = Computer(model, "cpu")
    served._model.rows = None  # type: ignore[method-assign,assignment]  # what is cached needs no model
    mean, residues = served.compute([*served.items("mean", [sequence]), *served.items("residues", [sequence])])
    near(mean, alone(serving.folder / "esm", "mean", sequence))
    near(residues, alone(serving.folder / "esm", "residues", sequence))
    assert math.isclose(float(residues.mean()), float(mean.mean()), abs_tol=1e-5)
