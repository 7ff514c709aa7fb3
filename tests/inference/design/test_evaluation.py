"""Metrics of designs follow their definitions, and are compared with baselines that know no structure."""

from pathlib import Path

import numpy as np
import pytest

from esmeray.inference.design import evaluation
from esmeray.inference.design.denoising import Denoiser
from esmeray.inference.design.evaluation import evaluate_designs
from esmeray.inference.design.sampling import Request, generate, log_likelihoods, recovery
from tests.structures import structure_store
from tests.tasks.test_diffusion_model import trained

pytestmark = pytest.mark.slow


def test_metrics_are_those_of_the_likeliest_designs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluation, "STEPS", 3)
    store, model = structure_store(tmp_path / "store", 6, validation_share=0.5), Denoiser(trained())
    found = evaluate_designs(model, store, store.validation)
    held_out = [store.structure(record) for record in store.validation.tolist()]
    assert found.proteins == len(held_out) > 2
    shares, losses = [], []
    for structure in held_out:
        (design,) = generate(model, [Request(structure, temperature=0.0, steps=3)], 1)
        shares.append(recovery(design.residues, structure.residues))
        losses.append(-log_likelihoods(model, structure, [structure.residues])[0])
    value, low, high = found.metrics["median recovery"]
    assert value == pytest.approx(np.median(shares)) and low <= value <= high
    lengths = [len(structure.residues) for structure in held_out]
    assert found.metrics["perplexity"][0] == pytest.approx(np.exp(np.average(losses, weights=lengths)))
    texts = [store.store.text(index) for index in store.training.tolist()]
    commonest = max("ACDEFGHIKLMNPQRSTVWY", key="".join(texts).count)
    alone = [structure.residues.count(commonest) / len(structure.residues) for structure in held_out]
    assert found.metrics["median recovery, composition"][0] == pytest.approx(np.median(alone))
    assert found.metrics["perplexity, secondary structure"][0] < found.metrics["perplexity, composition"][0]
