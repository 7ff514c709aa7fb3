"""Every architecture gives, on packed batches, what Hugging Face gives for one sequence at a time."""

from __future__ import annotations

import copy
import json
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from common.errors import ConfigError, DataError
from dataset.packed_batch import PackedBatch
from dataset.tokens.base import open_tokenizer
from dataset.tokens.esm import VOCABULARY, packed_from_tokens, sequence_lengths
from model.backbones.architectures import PACKED
from model.backbones.base import PackedBackbone, layer_groups
from model.backbones.esm2 import EsmBackbone
from model.backbones.huggingface import HuggingFaceBackbone, PaddedBackbone
from model.backbones.loading import build_backbone
from model.backbones.source import ALWAYS_PADDED
from tests.dataset.tokenizer_folders import FOR_PROTEINS, PROTEINS, ankh
from tests.model.backbones.test_source import Malicious
from tests.model.small_models import (
    PAD,
    POSITIONS,
    VOCABULARY_SIZE,
    features_alone,
    features_padded,
    save_small_model,
    small_model,
    token_batch,
)
from tests.model.support import assert_near, segments
from train_config.schema import BackboneSection

LENGTHS = [40, 1, 7, 130, 2, 63]
ARCHITECTURES = ["esm", *PACKED, "t5"]
ROTARY = ["esm", "esmc", "llama", "mistral", "qwen2", "qwen3"]
SMALL = {"layers": 2, "hidden_size": 32, "heads": 4}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(name: str) -> Any:
    """A model with Hugging Face's own attention."""
    return small_model(name)


@pytest.fixture(scope="module")
def packed(reference: Any) -> PackedBackbone:
    return wrapped(reference).eval()


@pytest.fixture(scope="module")
def batch() -> PackedBatch:
    return token_batch(LENGTHS)


def wrapped(model: Any, **settings: Any) -> PackedBackbone:
    """The backbone of its architecture, around a copy."""
    model, kind = copy.deepcopy(model), model.config.model_type
    if kind == "esm":
        return EsmBackbone(model, **settings)
    if kind in ALWAYS_PADDED:
        return PaddedBackbone(model, pad=PAD, **settings)
    return HuggingFaceBackbone(model, **settings)


@torch.no_grad()
def test_packed_features_equal_one_at_a_time(reference, packed, batch):
    assert_near(segments(packed(batch), batch), features_alone(reference, batch))


@torch.no_grad()
def test_packed_features_equal_a_padded_batch(reference, packed, batch):
    assert_near(segments(packed(batch), batch), features_padded(reference, batch))


@torch.no_grad()
def test_features_of_a_sequence_do_not_depend_on_its_neighbours(packed):
    one, other = token_batch([30, 5, 60]), token_batch([30, 50, 6])
    assert torch.equal(one.tokens[:30], other.tokens[:30])
    assert_near([packed(one)[:30]], [packed(other)[:30]])


def test_gradients_equal_those_of_one_at_a_time(reference, batch):
    packed, alone = wrapped(reference).eval(), copy.deepcopy(reference)
    weights_TD = torch.randn(batch.num_tokens, packed.hidden_size, generator=torch.Generator().manual_seed(1))
    (packed(batch) * weights_TD).sum().backward()
    (torch.cat(features_alone(alone, batch)) * weights_TD).sum().backward()
    theirs = dict(alone.named_parameters())
    learning = {name: parameter for name, parameter in packed.model.named_parameters() if parameter.requires_grad}
    assert learning and all(parameter.grad is not None for parameter in learning.values())
    assert_near([parameter.grad for parameter in learning.values()], [theirs[name].grad for name in learning])


@torch.no_grad()
def test_bf16_features_point_the_same_way(reference, packed, batch):
    half = copy.deepcopy(packed).bfloat16()
    for ours, theirs in zip(segments(half(batch), batch), features_alone(reference, batch), strict=True):
        assert nn.functional.cosine_similarity(ours.float().flatten(), theirs.flatten(), dim=0) >= 0.999


@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_frequencies_stay_fp32_when_the_model_is_cast(kind):
    whole = wrapped(small_model(kind))
    half = copy.deepcopy(whole).bfloat16()
    buffers = {name: buffer for name, buffer in half.named_buffers() if "inv_freq" in name}
    assert buffers and next(half.parameters()).dtype == torch.bfloat16
    assert all(torch.equal(buffer, dict(whole.named_buffers())[name]) for name, buffer in buffers.items())


def test_a_single_padding_token_is_taken_as_a_filler(packed):
    assert packed(token_batch([1])).shape == (1, packed.hidden_size)


def test_gradient_checkpointing_changes_no_gradient(reference, batch):
    gradients = []
    for checkpointing in (False, True):
        backbone = wrapped(reference, gradient_checkpointing=checkpointing).train()
        torch.manual_seed(0)
        backbone(batch).square().mean().backward()
        gradients.append({name: p.grad for name, p in backbone.named_parameters() if p.requires_grad})
    assert_near(list(gradients[1].values()), list(gradients[0].values()), 1e-6)


def test_gradient_checkpointing_computes_layers_again(reference, batch):
    calls: dict[bool, int] = {}
    for checkpointing in (False, True):
        backbone = wrapped(reference, gradient_checkpointing=checkpointing).train()
        seen: list[int] = []
        linear = next(module for module in layer_groups(backbone)[1][0].modules() if _is_projection(module))
        linear.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        backbone(batch).sum().backward()
        calls[checkpointing] = len(seen)
    assert calls[True] == 2 * calls[False]


def _is_projection(module: nn.Module) -> bool:
    return type(module).__name__ in ("Linear", "Conv1D")


def test_a_frozen_backbone_has_no_gradient_and_never_trains(reference, batch):
    backbone = wrapped(reference, frozen=True, gradient_checkpointing=True).train()
    assert not backbone.training and not backbone.model.training
    assert not backbone(batch).requires_grad
    assert not any(parameter.requires_grad for parameter in backbone.parameters())


def test_every_trainable_parameter_gets_a_gradient(reference, batch):
    backbone = wrapped(reference)
    backbone(batch).sum().backward()
    assert [n for n, p in backbone.named_parameters() if p.requires_grad and p.grad is None] == []


def test_a_backbone_knows_its_size_and_direction(name, packed):
    assert (packed.hidden_size, packed.num_layers) == (32, 2)
    assert packed.causal == (name in ("gpt2", "llama", "mistral", "qwen2", "qwen3"))


@torch.no_grad()
def test_causal_features_know_of_earlier_tokens_alone(packed):
    whole, start = token_batch([50]), token_batch([20])
    assert torch.equal(whole.tokens[:20], start.tokens)
    same = torch.allclose(packed(whole)[:20], packed(start), atol=1e-5)
    assert same == packed.causal


def test_layers_are_listed_from_the_embeddings_up_and_have_every_parameter(packed):
    embeddings, *layers = layer_groups(packed)
    assert len(layers) == packed.num_layers
    listed = [p for group in (embeddings, *layers) for module in group for p in module.parameters()]
    assert {id(p) for p in listed} == {id(p) for p in packed.parameters()}
    table = packed.model.get_input_embeddings().weight
    assert any(table is p for module in embeddings for p in module.parameters())


def test_wrapping_one_model_leaves_others_of_the_same_config_alone(name):
    if name in ("esm", "t5"):
        pytest.skip("its attention is not replaced")
    model = small_model(name)
    other = type(model)(model.config)
    wrapper = HuggingFaceBackbone(other)
    assert model.config._attn_implementation == "sdpa"
    assert wrapper.config._attn_implementation == "esmeray_packed"


def test_dropout_of_scores_is_drawn_in_training_alone(batch):
    backbone = wrapped(small_model("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5))
    with torch.no_grad():
        assert not torch.equal(backbone.train()(batch), backbone(batch))
        assert torch.equal(backbone.eval()(batch), backbone(batch))


@pytest.mark.parametrize(
    ("kind", "changes", "longest"),
    [
        ("bert", {}, POSITIONS),
        ("roberta", {}, POSITIONS),
        ("gpt2", {}, POSITIONS),
        ("mistral", {"sliding_window": 20}, 20),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}, 20),
        (
            "llama",
            {
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                "max_position_embeddings": 20,
            },
            20,
        ),
    ],
)
def test_a_sequence_beyond_the_positions_or_windows_is_refused(kind, changes, longest):
    model = small_model(kind, **changes)
    backbone = wrapped(model).eval()
    assert backbone.longest == longest
    fits = token_batch([longest, 3])
    with torch.no_grad():
        assert_near(segments(backbone(fits), fits), features_alone(model, fits))
    with pytest.raises(ConfigError, match=rf"data\.max_length to at most {longest - 2}"):
        backbone(token_batch([longest + 1]))


@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_positions_have_no_end(kind):
    assert wrapped(small_model(kind, **({"sliding_window": None} if kind == "mistral" else {}))).longest is None


@torch.no_grad()
def test_t5_is_padded_in_groups_of_like_length(batch):
    backbone = wrapped(small_model("t5")).eval()
    shapes: list[torch.Size] = []
    backbone.model.register_forward_pre_hook(
        lambda _, __, inputs: shapes.append(inputs["input_ids"].shape), with_kwargs=True
    )
    many = token_batch([1000, 3, 900, 2, 700, 1] * 4)
    features = segments(backbone(many), many)
    assert 1 < len(shapes) < many.num_sequences
    assert sum(rows * length for rows, length in shapes) <= many.num_tokens + 512 * len(shapes)
    assert_near(features[:6], features_alone(small_model("t5"), token_batch([1000, 3, 900, 2, 700, 1] * 4))[:6])


def test_an_architecture_that_is_not_known_packed_is_refused_naming_the_way_out(tmp_path, batch):
    model = save_small_model(tmp_path, "albert")
    with pytest.raises(ConfigError, match=r"type 'albert'.*set model\.backbone\.padded true") as refusal:
        build_backbone(BackboneSection(source=str(tmp_path)), seed=0)
    assert "\n" not in str(refusal.value)
    backbone = build_backbone(BackboneSection(source=str(tmp_path), padded=True), seed=0, pad=PAD).eval()
    with torch.no_grad():
        assert_near(segments(backbone(batch), batch), features_alone(model, batch))


@pytest.mark.parametrize("kind", ["bert", "roberta", "qwen2", "esm"])
def test_what_is_known_packed_can_be_padded_as_well(kind, tmp_path, batch):
    model = save_small_model(tmp_path, kind)
    backbone = build_backbone(BackboneSection(source=str(tmp_path), padded=True), seed=0, pad=PAD).eval()
    assert isinstance(backbone, PaddedBackbone)
    with torch.no_grad():
        assert_near(segments(backbone(batch), batch), features_alone(model, batch))


def test_a_network_without_an_attention_mask_is_refused(tmp_path):
    from transformers import FNetConfig, FNetModel

    config = FNetConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=16,
        num_hidden_layers=1,
        intermediate_size=16,
        max_position_embeddings=32,
    )
    FNetModel(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'fnet' takes no input_ids with an attention_mask"):
        build_backbone(BackboneSection(source=str(tmp_path), padded=True), seed=0)


def test_a_decoder_made_of_an_encoder_is_refused(tmp_path):
    save_small_model(tmp_path, "bert", is_decoder=True)
    with pytest.raises(ConfigError, match="is a decoder"):
        build_backbone(BackboneSection(source=str(tmp_path)), seed=0)
    assert build_backbone(BackboneSection(source=str(tmp_path), padded=True), seed=0).causal


@torch.no_grad()
def test_a_decoder_that_looks_both_ways_does_so_packed(batch):
    model = small_model("llama", is_causal=False)
    backbone = wrapped(model).eval()
    assert not backbone.causal
    assert_near(segments(backbone(batch), batch), features_alone(model, batch))


@pytest.mark.parametrize("kind", ["esm2_t6_8M", "bert", "qwen2", "llama", "t5"])
def test_random_weights_have_the_size_that_is_asked_for(kind):
    backbone = build_backbone(BackboneSection(source=kind, **SMALL), seed=0)
    assert (backbone.num_layers, backbone.hidden_size) == (2, 32)
    assert backbone.config.num_attention_heads == 4
    assert backbone.training and backbone(token_batch([5, 3])).shape == (8, 32)
    assert backbone.model.get_input_embeddings().weight.shape[0] == len(VOCABULARY)


@pytest.mark.parametrize("kind", ["bert", "qwen2", "llama", "t5"])
def test_random_weights_have_the_vocabulary_of_the_tokenizer(kind):
    backbone = build_backbone(BackboneSection(source=kind, **SMALL), seed=0, vocabulary_size=300, pad=7)
    assert backbone.model.get_input_embeddings().weight.shape[0] == 300
    assert backbone.config.pad_token_id == 7


@pytest.mark.parametrize("kind", ["bert", "qwen2", "t5"])
def test_random_weights_depend_on_the_seed_alone(kind):
    section = BackboneSection(source=kind, **SMALL)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build_backbone(section, seed=5).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = build_backbone(section, seed=5).state_dict(), build_backbone(section, seed=6).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("kind", ["esm2_t6_8M", "bert", "t5", "a folder"])
def test_an_empty_backbone_has_the_shapes_of_the_one_that_is_built(kind, tmp_path):
    section = BackboneSection(source=kind, **SMALL)
    if kind == "a folder":
        save_small_model(tmp_path, "qwen2")
        section = BackboneSection(source=str(tmp_path))
    built, empty = build_backbone(section, 0, 33, pad=1), build_backbone(section, 0, 33, pad=1, empty=True)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert {n: (p.shape, p.requires_grad) for n, p in empty.named_parameters()} == {
        n: (p.shape, p.requires_grad) for n, p in built.named_parameters()
    }


def test_channels_that_the_heads_cant_share_are_refused():
    with pytest.raises(ConfigError, match=r"32 can't be split over 5 heads; set model\.backbone\.heads to one of \[1"):
        build_backbone(BackboneSection(source="bert", hidden_size=32, heads=5), seed=0)
    with pytest.raises(ConfigError, match="even number of channels, which rotary"):
        build_backbone(BackboneSection(source="llama", hidden_size=12, heads=4), seed=0)


@pytest.mark.parametrize("kind", ["bert", "roberta", "qwen2", "llama", "t5", "esm"])
def test_loaded_weights_are_those_of_the_folder(kind, tmp_path, batch):
    model = save_small_model(tmp_path, kind)
    backbone = build_backbone(BackboneSection(source=str(tmp_path)), seed=0).eval()
    theirs = model.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in backbone.model.state_dict().items() if key in theirs)
    with torch.no_grad():
        assert_near(segments(backbone(batch), batch), features_alone(model, batch))


def test_weights_under_a_language_model_head_are_found(tmp_path):
    from transformers import BertForMaskedLM, T5ForConditionalGeneration

    for kind, head in (("bert", BertForMaskedLM), ("t5", T5ForConditionalGeneration)):
        whole = head(small_model(kind).config if kind == "bert" else _t5_config())
        whole.save_pretrained(tmp_path / kind)
        backbone = build_backbone(BackboneSection(source=str(tmp_path / kind)), seed=0)
        table = backbone.model.get_input_embeddings().weight
        assert torch.equal(table, whole.get_input_embeddings().weight)


def _t5_config() -> Any:
    from tests.model.small_models import small_config

    return small_config("t5")


@pytest.mark.parametrize("kind", ["prot_bert", "prot_t5", "ankh"])
def test_proteins_get_the_features_that_their_model_cards_describe(kind, tmp_path):
    folder = {**FOR_PROTEINS, "ankh": ankh}[kind](tmp_path / kind)
    model = save_small_model(folder, "bert" if kind == "prot_bert" else "t5", pad_token_id=0)
    tokenizer = open_tokenizer(folder)
    backbone = build_backbone(BackboneSection(source=str(folder)), 0, tokenizer.vocabulary_size, tokenizer.pad).eval()
    whole = [[*tokenizer.prefix, *tokenizer.encode([text])[0].tolist(), *tokenizer.suffix] for text in PROTEINS]
    batch = packed_from_tokens(np.concatenate(whole), sequence_lengths(whole))
    as_published = [" ".join(re.sub("[UZOB]", "X", text)) for text in PROTEINS] if kind != "ankh" else PROTEINS
    theirs = tokenizer._tokenizer if kind == "ankh" else AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        alone = [model(**theirs(text, return_tensors="pt")).last_hidden_state[0] for text in as_published]
        assert_near(segments(backbone(batch), batch), alone)


def test_size_settings_of_loaded_weights_are_refused(tmp_path):
    save_small_model(tmp_path, "bert")
    with pytest.raises(ConfigError, match="layers can't be set for loaded weights"):
        build_backbone(BackboneSection(source=str(tmp_path), layers=3), seed=0)


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path):
    save_small_model(tmp_path, "bert")
    build_backbone(BackboneSection(source=str(tmp_path)), seed=0, vocabulary_size=VOCABULARY_SIZE)
    with pytest.raises(ConfigError, match=r"tokenizer has 41 tokens, but the embedding.*40"):
        build_backbone(BackboneSection(source=str(tmp_path)), seed=0, vocabulary_size=VOCABULARY_SIZE + 1)
    with pytest.raises(ConfigError, match=r"4096 tokens, but the embedding of esm2_t6_8M 33"):
        build_backbone(BackboneSection(source="esm2_t6_8M", **SMALL), seed=0, vocabulary_size=4096)


def test_a_folder_of_pickles_alone_is_refused_and_not_read(tmp_path):
    save_small_model(tmp_path, "bert")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious(tmp_path / "pwned")))
    with pytest.raises(ConfigError, match=r"only pytorch_model\.bin, a pickle"):
        build_backbone(BackboneSection(source=str(tmp_path)), seed=0)
    assert not (tmp_path / "pwned").exists()


def test_code_named_by_a_config_is_not_run(tmp_path):
    save_small_model(tmp_path, "bert")
    _change_config(tmp_path, auto_map={"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"})
    (tmp_path / "evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'pwned')!r})\nclass Evil: pass\n")
    build_backbone(BackboneSection(source=str(tmp_path)), seed=0)
    assert not (tmp_path / "pwned").exists()


def _change_config(folder: Any, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "made_up"}, "'made_up', which transformers does not have; code of its own is never run"),
        ({"model_type": None}, "names no model_type"),
        ({"quantization_config": {"bits": 4}}, "are quantized"),
        ({"hidden_size": "many"}, "is no config of a bert"),
    ],
)
def test_a_config_that_describes_no_plain_model_is_refused(tmp_path, changes, message):
    save_small_model(tmp_path, "bert")
    _change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message) as refusal:
        build_backbone(BackboneSection(source=str(tmp_path)), seed=0)
    assert "\n" not in str(refusal.value)


def test_an_adapter_is_not_taken_for_a_model(tmp_path):
    save_small_model(tmp_path, "bert")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/elses"}')
    with pytest.raises(ConfigError, match="holds an adapter"):
        build_backbone(BackboneSection(source=str(tmp_path)), seed=0)


def test_a_folder_that_lacks_a_layer_is_refused(tmp_path):
    save_small_model(tmp_path, "bert")
    _change_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(DataError, match=r"lack encoder\.layer\.2"):
        build_backbone(BackboneSection(source=str(tmp_path)), seed=0)


@pytest.mark.parametrize("source", ["brt", "./nowhere"])
def test_an_unknown_source_is_refused(source):
    with pytest.raises(ConfigError, match=r"did you mean bert|there is no folder"):
        build_backbone(BackboneSection(source=source), seed=0)
