"""Sequence diffusion starts equal to its language model, weights its loss, and is equal after saving and opening."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.nn import functional

from esmeray.dataset.packed_batch import PackedBatch
from esmeray.inference.design.denoising import Denoiser
from esmeray.model.export.backbone import export
from esmeray.tasks.diffusion.data import StructureSource
from esmeray.tasks.diffusion.model import SequenceDiffusion, open_diffusion
from esmeray.tasks.diffusion.section import DiffusionSection
from esmeray.tasks.masked_lm.model import MaskedLM
from esmeray.tasks.section import ModelSection
from tests.structures import TINY_DIFFUSION, save_proteinmpnn, structure_store


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> PackedBatch:
    store = structure_store(tmp_path_factory.mktemp("structures") / "store", 6)
    source = StructureSource(store, DiffusionSection(), max_length=500, seed=0, training=False)
    return source.batch(0, np.arange(6)).batch


def trained(labels: tuple[str, ...] = ()) -> SequenceDiffusion:
    """A model with a nonzero adapter."""
    model = SequenceDiffusion.build(TINY_DIFFUSION, 0, labels).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    return model


def test_a_new_model_predicts_as_its_language_model_does(batch: PackedBatch):
    model, plain = SequenceDiffusion.build(TINY_DIFFUSION, 0).eval(), MaskedLM.build(TINY_DIFFUSION, 0).eval()
    with torch.no_grad():
        torch.testing.assert_close(model.logits(batch, model.conditions(batch)), plain.lm_head(plain.backbone(batch)))


def test_the_loss_is_the_weighted_sum_over_hidden_residues(batch: PackedBatch):
    model = trained()
    with torch.no_grad():
        output = model(batch)
        logits = model.logits(batch, model.conditions(batch))
        nothing = batch.adding({"coordinates": torch.full_like(batch.by_token["coordinates"], torch.nan)})
        free = model.logits(nothing, model.conditions(nothing))
    positions = batch.target_positions
    losses = functional.cross_entropy(logits[positions], batch.by_token["targets"][positions], reduction="none")
    weights = batch.by_sequence["weights"][batch.segment_ids()[positions]]
    torch.testing.assert_close(output.loss_sum, (losses * weights).sum())
    metrics = model.metrics(output.metrics)
    assert metrics["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    free_loss = functional.cross_entropy(free[positions], batch.by_token["targets"][positions])
    assert metrics["unconditional_loss"] == pytest.approx(float(free_loss), rel=1e-5)


def test_a_batch_without_targets_has_zero_loss_and_reaches_every_weight(batch: PackedBatch):
    model = trained(("helix",)).train()
    output = model(batch.without_targets())
    output.loss_sum.backward()
    assert output.loss_sum == 0 and output.num_targets == 0
    missing = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    assert not missing, missing


@pytest.mark.parametrize("frozen", [False, True])
def test_an_export_has_the_trained_weights_that_its_encoder_started_from(
    tmp_path: Path, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch, frozen: bool
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    encoder = {"source": str(save_proteinmpnn(tmp_path / "own.pt")), "frozen": frozen}
    model = SequenceDiffusion.build(
        ModelSection(task="diffusion", backbone=TINY_DIFFUSION.backbone, diffusion={"encoder": encoder}), 0
    )
    nn.init.normal_(model.adapter.output.weight)
    model(batch.without_targets()).loss_sum.backward()
    missing = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    weights = [weight for name, weight in model.named_parameters() if name.startswith("structure_encoder.network")]
    assert (
        not missing
        and len(weights) > 100
        and sum(weight.requires_grad for weight in weights) == (0 if frozen else len(weights) - 1)
    )
    folder = export(model.eval(), tmp_path / "export")
    (tmp_path / "own.pt").unlink()
    shutil.rmtree(tmp_path / "cache")
    opened = open_diffusion(folder)
    with torch.no_grad():
        torch.testing.assert_close(
            opened.logits(batch, opened.conditions(batch)), model.logits(batch, model.conditions(batch))
        )
    assert "trained from own.pt (unknown license)" in (folder / "README.md").read_text()
    assert Denoiser(opened).weights == "own.pt (unknown license)"


def test_the_size_of_trained_weights_can_not_be_set():
    for encoder, words in [
        (
            {"source": "proteinmpnn", "layers": 2, "neighbours": 9},
            "layers, neighbours can't be set, because the weights",
        ),
        ({"frozen": True}, "frozen can't be set, because there is no source"),
    ]:
        with pytest.raises(ValidationError, match=words):
            DiffusionSection.model_validate({"encoder": encoder})


def test_an_export_is_opened_as_it_was(tmp_path: Path, batch: PackedBatch):
    model = trained(("helix", "barrel"))
    opened = open_diffusion(export(model, tmp_path / "export"))
    with torch.no_grad():
        torch.testing.assert_close(
            opened.logits(batch, opened.conditions(batch)), model.logits(batch, model.conditions(batch))
        )
    assert opened.labels == ("helix", "barrel")
