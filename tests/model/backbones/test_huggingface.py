"""Every architecture gives the same features on packed batches as Hugging Face on single sequences."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from esmeray.common.errors import ConfigError
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.dataset.tokens.esm import MASK
from esmeray.model.backbones.base import PackedBackbone, decayed_rates
from esmeray.model.backbones.esm2 import EsmBackbone
from esmeray.model.backbones.huggingface import HuggingFaceBackbone, PaddedBackbone
from esmeray.model.backbones.lora import chosen_layers
from esmeray.model.backbones.source import ALWAYS_PADDED, PACKED
from tests.model.small_models import PAD, POSITIONS, features_alone, small_model, token_batch
from tests.model.support import assert_near, segments

ARCHITECTURES = ["esm", *PACKED, "t5"]
CAUSAL = {"gpt2", "llama", "mistral", "qwen2", "qwen3"}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
ROTARY = ["esm", "esmc", "llama", "mistral", "modernbert", "qwen2", "qwen3"]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(name: str) -> Any:
    """Model with Hugging Face's own attention."""
    return small_model(name)


@pytest.fixture(scope="module")
def packed(reference: Any) -> PackedBackbone:
    return wrapped(reference).eval()


@pytest.fixture(scope="module")
def batch() -> PackedBatch:
    """A batch with mask tokens: ESM-2 scales the other tokens of a sequence by their share; other models do not."""
    batch = token_batch([40, 1, 7, 90, 2])
    hidden_T = (torch.arange(batch.num_tokens) % 3 == 0) & (batch.segment_ids() > 0)
    return replace(batch, tokens=torch.where(hidden_T, MASK, batch.tokens))


def wrapped(model: Any, **settings: Any) -> PackedBackbone:
    """Wrap a copy of the model in its architecture's backbone."""
    model, kind = copy.deepcopy(model), model.config.model_type
    if kind == "esm":
        return EsmBackbone(model, **settings)
    if kind in ALWAYS_PADDED:
        return PaddedBackbone(model, pad=PAD, **settings)
    return HuggingFaceBackbone(model, **settings)


def test_features_and_gradients_equal_one_at_a_time(reference, batch):
    packed, alone = wrapped(reference).eval(), copy.deepcopy(reference)
    ours, theirs = packed(batch), torch.cat(features_alone(alone, batch))
    assert_near(ours.detach(), theirs.detach())
    weights_TD = torch.randn(batch.num_tokens, packed.hidden_size, generator=torch.Generator().manual_seed(1))
    (ours * weights_TD).sum().backward()
    (theirs * weights_TD).sum().backward()
    parameters = dict(alone.named_parameters())
    learning = {name: parameter for name, parameter in packed.model.named_parameters() if parameter.requires_grad}
    assert learning and all(parameter.grad is not None for parameter in learning.values())
    assert_near([parameter.grad for parameter in learning.values()], [parameters[name].grad for name in learning])


@torch.no_grad()
def test_bf16_features_point_the_same_way_and_rotary_frequencies_stay_fp32(name, reference, packed, batch):
    half = copy.deepcopy(packed).bfloat16()
    for ours, theirs in zip(segments(half(batch), batch), features_alone(reference, batch), strict=True):
        assert nn.functional.cosine_similarity(ours.float().flatten(), theirs.flatten(), dim=0) >= 0.999
    buffers = {name: buffer for name, buffer in half.named_buffers() if "inv_freq" in name}
    assert bool(buffers) == (name in ROTARY) and next(half.parameters()).dtype == torch.bfloat16
    assert all(torch.equal(buffer, dict(packed.named_buffers())[name]) for name, buffer in buffers.items())


def test_gradient_checkpointing_changes_no_gradient(reference, batch):
    gradients, calls = [], []
    for checkpointing in (False, True):
        backbone = wrapped(reference, gradient_checkpointing=checkpointing).train()
        seen: list[int] = []
        name = next(name for name in chosen_layers(backbone.model, ["all-linear"]) if ".0." in name)
        backbone.model.get_submodule(name).register_forward_hook(lambda *_, seen=seen: seen.append(1))
        torch.manual_seed(0)
        backbone(batch).square().mean().backward()
        gradients.append([p.grad for p in backbone.parameters() if p.requires_grad])
        calls.append(len(seen))
    assert calls[1] == 2 * calls[0]
    assert_near(gradients[1], gradients[0], 1e-6)


@pytest.mark.parametrize("kind", ["esm", "t5"])
def test_a_frozen_backbone_has_no_gradient_and_never_trains(kind, batch):
    backbone = wrapped(small_model(kind), frozen=True, gradient_checkpointing=True).train()
    assert not backbone.training and not backbone.model.training
    assert not backbone(batch).requires_grad
    assert not any(parameter.requires_grad for parameter in backbone.parameters())


@torch.no_grad()
def test_a_backbone_knows_its_direction_and_the_rates_of_its_layers(name, packed):
    assert packed.causal == (name in CAUSAL)
    whole, start = token_batch([50]), token_batch([20])
    assert torch.allclose(packed(whole)[:20], packed(start), atol=1e-5) == packed.causal
    rates = decayed_rates(packed, 0.5)
    assert rates.keys() == set(packed.parameters())
    assert set(rates.values()) == {0.5, 0.25, 0.125}
    assert rates[packed.model.get_input_embeddings().weight] == 0.125
    assert rates[list(packed.model.parameters())[-1]] == 0.5


@pytest.mark.parametrize(
    ("kind", "changes", "longest"),
    [
        ("esm", {"position_embedding_type": "absolute", "max_position_embeddings": 20}, 18),  # ESM-1b
        ("esm", {"emb_layer_norm_before": True}, None),
        ("roberta", {}, POSITIONS),
        ("gpt2", {}, POSITIONS),
        ("mistral", {"sliding_window": 20}, 20),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}, 20),
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 20}, 20),
        ("llama", {"is_causal": False}, None),  # a decoder with bidirectional attention
    ],
)
@torch.no_grad()
def test_variants_of_backbones_equal_one_sequence_at_a_time(kind, changes, longest):
    model = small_model(kind, **changes)
    backbone = wrapped(model).eval()
    assert backbone.longest == longest
    fits = token_batch([longest or 90, 3])
    assert_near(segments(backbone(fits), fits), features_alone(model, fits))
    if longest is not None:
        with pytest.raises(ConfigError, match=rf"data\.max_length to at most {longest - 2}"):
            backbone(token_batch([longest + 1]))
