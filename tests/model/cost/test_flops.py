"""Operations of a token against a count by hand."""

import pytest

from esmeray.model.cost.flops import training_flops_per_token
from tests.model.support import build_model
from tests.runs import tiny_config

CONTEXT = 50.0
UNUSED = 1e-3
"""ESM-2's contact head is counted, a weight for each head of each layer, and never run."""


def by_hand(config, head_weights: int) -> tuple[float, float, float]:
    """Backbone weights, head weights and forward attention operations of an ESM-2."""
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    return layers * (4 * width * width + 2 * width * inner), head_weights, layers * 4 * width * CONTEXT


def test_trained_language_model_takes_six_for_each_weight_and_twelve_for_attention(tmp_path):
    model = build_model(tiny_config(tmp_path, model={"task": "masked_lm", "backbone": {"frozen": False}}).model, seed=0)
    config = model.backbone.config
    backbone, head, attention = by_hand(config, config.hidden_size**2 + config.hidden_size * config.vocab_size)
    assert training_flops_per_token(model, CONTEXT) == pytest.approx(6 * (backbone + head) + 3 * attention, UNUSED)


def test_frozen_backbone_takes_two_for_each_weight_and_nothing_where_its_features_are_kept(tmp_path):
    model = build_model(tiny_config(tmp_path, model={"task": "autoencoder"}).model, seed=0)
    model.backbone.requires_grad_(False)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad and p.ndim > 1)
    backbone, _, attention = by_hand(model.backbone.config, 0)
    assert training_flops_per_token(model, CONTEXT) == pytest.approx(2 * backbone + attention + 6 * trained, UNUSED)
    assert training_flops_per_token(model, CONTEXT, runs_backbone=False) == pytest.approx(6 * trained)
