"""Memory estimates follow ZeRO's formulas and a built model's weights; operations equal a count by hand."""

import pytest

from esmeray.dataset.targets import LabelSpace
from esmeray.dataset.tokens.base import EsmSequenceTokenizer
from esmeray.model.cost.flops import training_flops_per_token
from esmeray.model.cost.memory import count_parameters, estimate_memory
from esmeray.model.parameter_groups import layer_matrices
from esmeray.model.section import BackboneSection
from esmeray.tasks.classifier.model import build_classifier
from esmeray.tasks.masked_lm.model import MaskedLM
from esmeray.tasks.section import ModelSection
from tests.model.support import build_model, tiny_section


def counted(model):
    parameters = list(model.parameters())
    matrices = layer_matrices(model.backbone.layers)
    trained = [p for p in parameters if p.requires_grad]
    return tuple(sum(p.numel() for p in chosen) for chosen in (parameters, trained, matrices))


@pytest.mark.parametrize("source", ["esm2_t6_8M", "qwen2", "t5"])
@pytest.mark.parametrize(
    ("kind", "classifier", "backbone"),
    [
        ("multiclass", {}, {}),
        ("per_residue", {"head": "mlp", "hidden_size": 20}, {"frozen": True}),
        ("regression", {"pooling": "light_attention", "light_attention_kernel": 3}, {}),
        ("multilabel", {"pooling": "light_attention", "head": "mlp", "hidden_size": 10}, {"lora": {"rank": 3}}),
        ("multiclass", {"pooling": "last"}, {"lora": {"rank": 2, "targets": ["all-linear"]}}),
    ],
)
def test_the_count_of_a_classifier_equals_the_built_model(source, kind, classifier, backbone):
    section = ModelSection(
        task="classifier",
        backbone={"source": source, "layers": 2, "hidden_size": 32, "heads": 2, **backbone},
        classifier=classifier,
    )
    space, tokenizer = LabelSpace(kind, ("a", "b", "c")), EsmSequenceTokenizer()
    count = count_parameters(build_classifier(section, 0, space, tokenizer, empty=True))
    assert count == counted(build_classifier(section, 0, space, tokenizer))


@pytest.mark.parametrize(("name", "billions"), [("esm2_t6_8M", 0.0075), ("esm2_t48_15B", 15.13)])
def test_sizes_have_the_published_number_of_parameters(name, billions):
    section = ModelSection(task="masked_lm", backbone=BackboneSection(source=name))
    total, *_ = count_parameters(MaskedLM.build(section, seed=0, empty=True))
    assert total / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"), [(0, 2, 2, 12), (1, 2, 4, 3), (2, 2, 1, 3), (3, 0.5, 1, 3)]
)
def test_bytes_per_parameter_in_bf16_on_four_devices_and_in_fp32_on_one(stage, weights, gradients, optimizer):
    count = count_parameters(build_model(tiny_section("masked_lm"), seed=0))
    estimate = estimate_memory(count, stage=stage, world_size=4, precision="bf16")
    assert estimate.parameter_bytes == pytest.approx(weights * count.total, abs=1)
    assert estimate.gradient_bytes == pytest.approx(gradients * count.trainable, abs=1)
    assert estimate.optimizer_bytes == pytest.approx(optimizer * count.trainable, abs=1)
    muon = estimate_memory(count, stage=stage, world_size=4, precision="bf16", optimizer="muon")
    fewer = 4 * count.matrices / (4 if stage else 1)
    assert estimate.optimizer_bytes - muon.optimizer_bytes == pytest.approx(fewer, abs=1) and fewer > 0
    offloaded = estimate_memory(count, stage=stage, world_size=4, precision="bf16", offload_optimizer=True)
    assert (offloaded.optimizer_bytes, offloaded.host_optimizer_bytes) == (0, estimate.optimizer_bytes)
    plain = estimate_memory(count, stage=stage, world_size=1, precision="fp32")
    assert plain[1:] == (4 * count.total, 4 * count.trainable, 8 * count.trainable, 0)


CONTEXT = 50.0
UNUSED = 1e-3
"""Relative tolerance for ESM-2's contact head: its weights, one per layer and head, are counted but never run."""


def by_hand(config, head_weights: int) -> tuple[float, float, float]:
    """Number of backbone weights, head weights and forward attention operations of an ESM-2."""
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    return layers * (4 * width * width + 2 * width * inner), head_weights, layers * 4 * width * CONTEXT


def test_training_takes_12_flops_per_attention_and_6_per_weight():
    model = build_model(tiny_section("masked_lm"), seed=0)
    config = model.backbone.config
    backbone, head, attention = by_hand(config, config.hidden_size**2 + config.hidden_size * config.vocab_size)
    assert training_flops_per_token(model, CONTEXT) == pytest.approx(6 * (backbone + head) + 3 * attention, UNUSED)


def test_a_frozen_backbone_takes_2_flops_per_weight():
    model = build_model(tiny_section("autoencoder", frozen=True), seed=0)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad and p.ndim > 1)
    backbone, _, attention = by_hand(model.backbone.config, 0)
    assert training_flops_per_token(model, CONTEXT) == pytest.approx(2 * backbone + attention + 6 * trained, UNUSED)
    assert training_flops_per_token(model, CONTEXT, runs_backbone=False) == pytest.approx(6 * trained)
