"""Adapters wrap the configured layers, start at zero, are trained alone, and are merged or kept like peft's."""

import json

import pytest
import torch

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.tokens.esm import pack_sequences
from esmeray.model.backbones.loading import build_backbone
from esmeray.model.backbones.lora import (
    adapt,
    load_adapter,
    merge,
    merged_state,
    save_adapter,
)
from esmeray.model.section import BackboneSection, LoraSection
from tests.model.support import assert_near, random_sequences

SIZE = {"layers": 2, "hidden_size": 32, "heads": 4}
BATCH = pack_sequences(random_sequences([12, 1, 40]))
FIRST_PROJECTIONS = {
    "esm2_t6_8M": [
        f"encoder.layer.0.attention.{name}" for name in ("self.query", "self.key", "self.value", "output.dense")
    ],
    "qwen2": [f"layers.0.self_attn.{name}_proj" for name in "qkvo"],
    "t5": [f"encoder.block.0.layer.0.SelfAttention.{name}" for name in "qkvo"],
}
"""Attention projections of the first of two layers, per backbone."""


def backbone(source="esm2_t6_8M", seed=0, **changes):
    return build_backbone(BackboneSection(source=source, **SIZE | changes), seed).eval()


def adapted(source="esm2_t6_8M", learnt=True, **settings):
    made = backbone(source)
    torch.manual_seed(1)
    adapt(made, LoraSection(**{"rank": 4, **settings}))
    if learnt:
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.1)
    return made.eval()


def trainable(module):
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def test_unknown_targets_and_frozen_backbones_are_refused():
    for name in ("querry", "attention.self", "embeddings"):
        with pytest.raises(ConfigError, match=rf"^.*no linear layer is named '{name}'.*attention\.self\.query.*$"):
            adapt(backbone(), LoraSection(rank=2, targets=[name]))
    made = backbone(frozen=True)
    adapt(made, LoraSection(rank=0))
    assert not hasattr(made.model, "peft_config")
    with pytest.raises(ConfigError, match=r"frozen .* can't both be set"):
        adapt(made, LoraSection(rank=2))


@pytest.mark.parametrize("source", FIRST_PROJECTIONS)
def test_an_adapter_starts_as_nothing_and_is_merged_exactly(source):
    plain, made = backbone(source), adapted(source, learnt=False)
    assert_near(made(BATCH), plain(BATCH))
    layers = {name.removeprefix("model.").partition(".lora_")[0] for name in trainable(made)}
    assert layers >= set(FIRST_PROJECTIONS[source]) and len(layers) == 2 * 4
    assert all("lora_A" in name or "lora_B" in name for name in trainable(made))
    made = adapted(source)
    features = made(BATCH)
    features.square().sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters() if parameter.requires_grad)
    assert not torch.allclose(features, plain(BATCH), atol=1e-2)
    state = merged_state(made.model)
    assert torch.equal(made(BATCH), features), "nothing was changed"
    merge(made)
    assert_near(made(BATCH), features)
    assert made.state_dict().keys() == plain.state_dict().keys() and not hasattr(made.model, "peft_config")
    merged = made.model.state_dict()
    assert state.keys() == merged.keys() and not trainable(made)
    assert_near(list(state.values()), [merged[name] for name in state])


def test_an_adapter_is_restored_whole_and_saved_as_the_same_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        made = adapted(targets=["all-linear"], alpha=3.0)
        save_adapter(made, tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    restored = backbone()
    load_adapter(restored, tmp_path / "a")
    state = restored.eval().state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in made.state_dict().items())


def test_an_adapter_that_is_damaged_or_of_another_backbone_is_refused(tmp_path):
    save_adapter(adapted(), tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"r": 2}))
    with pytest.raises(DataError, match="does not fit the backbone"):
        load_adapter(backbone(), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(DataError, match="can't be read"):
        load_adapter(backbone(), tmp_path)
