"""The packed masked language model is EsmForMaskedLM, and its loss and values are sums over targets."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from model.backbones.esm2 import EsmBackbone
from model.backbones.loading import load_network
from model.tasks.base import target_positions
from model.tasks.masked_lm import MaskedLM
from tests.model.support import (
    TINY,
    assert_near,
    masked_batch,
    random_sequences,
    residue_batch,
    segments,
    without_targets,
)

LENGTHS = [33, 1, 80, 12]
SHARES = [0.15, 0.0, 0.4, 0.8]


@pytest.fixture
def network():
    network = load_network(TINY, seed=1).eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network.lm_head.bias.data.normal_()
    return network


@pytest.fixture
def model(network):
    whole = copy.deepcopy(network)
    return MaskedLM(EsmBackbone(whole.esm), whole.lm_head).eval()


@pytest.fixture
def batch():
    return masked_batch(random_sequences(LENGTHS), SHARES)


@torch.no_grad()
def logits_alone(network, batch):
    return torch.cat([network(tokens[None]).logits[0] for tokens in segments(batch.tokens, batch)])


def test_loss_is_the_cross_entropy_summed_over_targets(network, model, batch):
    output = model(batch)
    expected = functional.cross_entropy(logits_alone(network, batch), batch.targets, reduction="sum")
    assert_near(output.loss_sum, expected)
    assert output.num_targets == (batch.targets != -100).sum()
    assert output.loss_sum.dtype == torch.float32


def test_figures_are_those_of_all_targets(network, model, batch):
    values = model.metrics(model(batch).metrics)
    logits, wanted = logits_alone(network, batch), batch.targets != -100
    loss = functional.cross_entropy(logits, batch.targets).item()
    assert values["loss"] == pytest.approx(loss, rel=1e-5)
    assert values["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    recovered = (logits.argmax(-1) == batch.targets)[wanted].float().mean().item()
    assert values["residue_recovery"] == pytest.approx(recovered)


def test_logits_are_computed_at_targets_alone(model, batch):
    rows = []
    model.lm_head.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[0]))
    model(batch)
    assert rows == [int((batch.targets != -100).sum())]


def test_positions_found_beforehand_give_the_same(model, batch):
    found = replace(batch, target_positions=target_positions(batch))
    assert torch.equal(model(batch).loss_sum, model(found).loss_sum)


def test_output_weights_are_tied_to_the_embeddings(model, batch):
    assert model.lm_head.decoder.weight is model.backbone.model.embeddings.word_embeddings.weight
    model.bfloat16()
    assert model.lm_head.decoder.weight is model.backbone.model.embeddings.word_embeddings.weight


def test_a_batch_without_targets_gives_zero_loss_and_zero_gradients(model, batch):
    output = model.train()(without_targets(batch))
    output.loss_sum.backward()
    assert output.loss_sum == 0 and output.num_targets == 0
    assert all(p.grad is not None and p.grad.eq(0).all() for p in model.parameters() if p.requires_grad)
    assert model.metrics(output.metrics) == {}


def test_a_frozen_backbone_trains_the_head_alone(network, batch):
    model = MaskedLM(EsmBackbone(network.esm, frozen=True), network.lm_head)
    model(batch).loss_sum.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {
        f"lm_head.{n}" for n in ("bias", "dense.weight", "dense.bias", "layer_norm.weight", "layer_norm.bias")
    }


def test_bf16_gives_an_fp32_loss_close_to_fp32(model, batch):
    exact = model(batch).loss_sum
    rounded = model.bfloat16()(batch).loss_sum
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.01, atol=0)


def test_a_batch_without_any_targets_field_is_refused(model):
    with pytest.raises(ValueError, match="needs a batch with targets"):
        model(replace(residue_batch(["MKT"]), targets=None))
