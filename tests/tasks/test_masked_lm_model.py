"""The packed masked language model is EsmForMaskedLM, and its loss and values are sums over targets."""

import copy
import math

import pytest
import torch
from torch.nn import functional

from esmeray.model.backbones.esm2 import EsmBackbone
from esmeray.model.backbones.loading import load_network
from esmeray.tasks.masked_lm.model import MaskedLM
from tests.model.support import TINY, assert_near, masked_batch, random_sequences, segments, without_targets

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


def test_loss_and_metrics_are_those_of_all_targets(network, model, batch):
    output, logits = model(batch), logits_alone(network, batch)
    wanted = batch.by_token["targets"] != -100
    loss = functional.cross_entropy(logits[wanted], batch.by_token["targets"][wanted], reduction="sum")
    assert_near(output.loss_sum, loss)
    assert output.num_targets == wanted.sum() and output.loss_sum.dtype == torch.float32
    values, mean = model.metrics(output.metrics), (loss / wanted.sum()).item()
    assert values["loss"] == pytest.approx(mean, rel=1e-5)
    assert values["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
    recovered = (logits.argmax(-1) == batch.by_token["targets"])[wanted].float().mean().item()
    assert values["residue_recovery"] == pytest.approx(recovered)


def test_logits_are_computed_at_targets_alone(model, batch):
    rows = []
    model.lm_head.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[0]))
    model(batch)
    assert rows == [int((batch.by_token["targets"] != -100).sum())]


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
