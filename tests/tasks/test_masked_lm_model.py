"""The packed masked language model is EsmForMaskedLM, and its loss and values are sums over targets."""

import copy
import math

import pytest
import torch
from torch.nn import functional

from esmeray.model.backbones.esm2 import EsmBackbone
from esmeray.model.backbones.loading import load_network
from esmeray.tasks.masked_lm.model import MaskedLM
from tests.model.support import TINY, assert_near, masked_batch, random_sequences, segments, tiny_section


def test_loss_and_metrics_are_those_of_all_targets_and_logits_are_computed_at_them_alone():
    network = load_network(TINY, seed=1).eval()
    torch.nn.init.normal_(network.lm_head.bias)
    whole = copy.deepcopy(network)
    model = MaskedLM(EsmBackbone(whole.esm), whole.lm_head).eval()
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[0]))
    batch = masked_batch(random_sequences([33, 1, 80, 12]), [0.15, 0.0, 0.4, 0.8])
    output = model(batch)
    with torch.no_grad():
        logits = torch.cat([network(tokens[None]).logits[0] for tokens in segments(batch.tokens, batch)])
    wanted = batch.by_token["targets"] != -100
    assert rows == [int(wanted.sum())]
    loss = functional.cross_entropy(logits[wanted], batch.by_token["targets"][wanted], reduction="sum")
    assert_near(output.loss_sum, loss)
    assert output.num_targets == wanted.sum() and output.loss_sum.dtype == torch.float32
    values, mean = model.metrics(output.metrics), (loss / wanted.sum()).item()
    assert values["loss"] == pytest.approx(mean, rel=1e-5)
    assert values["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
    recovered = (logits.argmax(-1) == batch.by_token["targets"])[wanted].float().mean().item()
    assert values["residue_recovery"] == pytest.approx(recovered)


def test_output_weights_are_tied_to_the_embeddings_also_in_bf16():
    model = MaskedLM.build(tiny_section("masked_lm"), seed=0).bfloat16()
    assert model.lm_head.decoder.weight is model.backbone.model.embeddings.word_embeddings.weight
