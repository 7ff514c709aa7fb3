"""The autoencoder's loss, metrics, encode and decode."""

import pytest
import torch
from torch.nn import functional

from esmeray.common.errors import ConfigError, DataError
from esmeray.model.heads.normalization import FeatureStatistics
from esmeray.tasks.autoencoder.model import ESM2Autoencoder
from esmeray.tasks.autoencoder.section import AutoencoderSection
from tests.model.support import (
    assert_near,
    build_model,
    random_sequences,
    residue_batch,
    segments,
    tiny_section,
)


def build(*, frozen=True, hidden_sizes=(24, 8)) -> ESM2Autoencoder:
    section = tiny_section(frozen=frozen)
    autoencoder = AutoencoderSection(hidden_sizes=list(hidden_sizes))
    model = build_model(section.model_copy(update={"autoencoder": autoencoder}), seed=0)
    assert isinstance(model, ESM2Autoencoder)
    statistics = FeatureStatistics(model.backbone.hidden_size)
    model.measure(residue_batch(random_sequences([60] * 10, seed=9)), statistics)
    model.normalization.set(statistics)
    return model


@pytest.fixture(scope="module")
def batch():
    return residue_batch(random_sequences([30, 1, 64, 9]))


def test_loss_is_the_sum_of_its_terms(batch):
    model = build()
    output = model(batch)
    residues = batch.by_token["targets"] != -100
    with torch.no_grad():
        normal = model.normalization(model.backbone(batch))[residues]
        decoded = model.decoder(model.encoder(normal))
        logits = model.residue_head(decoded)
    squared = (decoded - normal).square().mean(-1)
    cosine = functional.cosine_similarity(decoded, normal, dim=-1)
    residue = functional.cross_entropy(logits, batch.by_token["targets"][residues], reduction="none")
    expected = (squared + residue).sum()
    assert_near(output.loss_sum.detach(), expected)
    assert output.num_targets == 104 and output.loss_sum.dtype == torch.float32
    assert all(value.dtype == torch.float64 and not value.requires_grad for value in output.metrics.values())

    values = model.metrics(output.metrics)
    r2 = 1 - (decoded - normal).square().sum() / (normal - normal.mean(0)).square().sum()
    assert values["feature_r2"] == pytest.approx(r2.item(), rel=1e-5)
    assert values["feature_cosine"] == pytest.approx(cosine.mean().item(), rel=1e-5)
    correct = logits.argmax(-1) == batch.by_token["targets"][residues]
    assert values["residue_recovery"] == pytest.approx(correct.float().mean().item())
    assert values["loss"] == pytest.approx(expected.item() / 104, rel=1e-5)
    assert values["compression_ratio"] == 4


def test_the_feature_target_has_no_gradient(batch):
    """With the encoder's gradient cut, the backbone gets no gradient."""
    model = build(frozen=False)
    model.encoder.register_forward_pre_hook(lambda _, inputs: (inputs[0].detach(),))
    model(batch).loss_sum.backward()
    assert all(parameter.grad is None for parameter in model.backbone.parameters())


def test_encode_gives_one_row_per_residue_in_order_whatever_the_batches():
    model, lengths = build(), [12, 1, 50, 3]
    sequences = random_sequences(lengths)
    latents = model.encode(sequences)
    assert [tuple(latent.shape) for latent in latents] == [(length, 8) for length in lengths]
    assert_near(model.encode(sequences, max_tokens=16), latents)
    assert_near([model.encode([sequence])[0] for sequence in sequences], latents)
    assert all(map(torch.equal, model.encode(residue_batch(sequences)), latents))
    assert model.encode([]) == [] and model.decode([]) == ([], [])


def test_decode_gives_features_in_the_scale_of_the_backbone(batch):
    model = build()
    features, logits = model.decode(model.encode(batch))
    assert [len(rows) for rows in features] == [30, 1, 64, 9]
    assert [tuple(rows.shape) for rows in logits] == [(length, 33) for length in (30, 1, 64, 9)]
    with torch.no_grad():
        truth = model.backbone(batch)
        wanted = model.normalization.inverse(model.decoder(model.encoder(model.normalization(truth))))
    assert_near(features[2], segments(wanted, batch)[2][1:-1])
    with pytest.raises(DataError, match=r"\(residues, 8\), found \(5, 7\)"):
        model.decode([torch.zeros(5, 7)])
    with pytest.raises(ConfigError, match="latents: expected a list of tensors, found"):
        model.decode(torch.zeros(5, 8))
