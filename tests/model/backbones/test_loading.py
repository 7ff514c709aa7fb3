"""Backbones are built from the config: random by the seed, or from safetensors only; errors name the fault."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FNetConfig, FNetModel, OlmoConfig, OlmoModel, T5ForConditionalGeneration

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.tokens.esm import VOCABULARY
from esmeray.model.backbones.huggingface import PaddedBackbone
from esmeray.model.backbones.huggingface_loading import read_config
from esmeray.model.backbones.loading import build_backbone
from esmeray.model.backbones.source import PACKED
from esmeray.model.section import BackboneSection
from tests.model.small_models import (
    PAD,
    VOCABULARY_SIZE,
    features_alone,
    save_masked_lm,
    save_small_model,
    small_config,
    token_batch,
)
from tests.model.support import assert_near, segments

SMALL = {"layers": 2, "hidden_size": 32, "heads": 4}


class Malicious:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def build(folder: Path, **settings: Any):
    return build_backbone(BackboneSection(source=str(folder), **settings), seed=0, pad=PAD)


@pytest.fixture(scope="module")
def batch():
    return token_batch([40, 1, 7])


@pytest.mark.parametrize("kind", ["esm2_t6_8M", "esmc", "modernbert", "bert", "qwen2", "llama", "t5"])
def test_drawn_weights_depend_on_the_seed_alone(kind):
    section = BackboneSection(source=kind, **SMALL)
    before = torch.random.get_rng_state()
    backbone = build_backbone(section, seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (backbone.num_layers, backbone.hidden_size, backbone.config.num_attention_heads) == (2, 32, 4)
    assert backbone.training and backbone(token_batch([5, 3])).shape == (8, 32)
    assert backbone.model.get_input_embeddings().weight.shape[0] == len(VOCABULARY)
    torch.manual_seed(2)
    again, other = (build_backbone(section, seed).parameters() for seed in (5, 6))
    assert all(map(torch.equal, backbone.parameters(), again))
    assert not all(map(torch.equal, backbone.parameters(), other))
    if kind != "esm2_t6_8M":
        wide = build_backbone(section, seed=0, vocabulary_size=300, pad=7)
        assert wide.model.get_input_embeddings().weight.shape[0] == 300 and wide.config.pad_token_id == 7


@pytest.mark.parametrize("kind", ["bert", "qwen2", "t5", "esm"])
@torch.no_grad()
def test_packed_and_padded_backbones_have_the_folders_weights(kind, tmp_path, batch):
    model = save_small_model(tmp_path, kind)
    backbone = build(tmp_path).eval()
    theirs = model.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in backbone.model.state_dict().items() if key in theirs)
    padded = build(tmp_path, padded=True).eval()
    assert isinstance(padded, PaddedBackbone)
    for made in (backbone, padded):
        assert_near(segments(made(batch), batch), features_alone(model, batch))


@torch.no_grad()
def test_an_unknown_architecture_is_padded(tmp_path, batch, monkeypatch):
    config = FNetConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    FNetModel(config).save_pretrained(tmp_path / "fnet")
    with pytest.raises(ConfigError, match="'fnet' does not accept input_ids with an attention_mask"):
        build(tmp_path / "fnet", padded=True)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = OlmoModel(OlmoConfig(vocab_size=40, intermediate_size=64, pad_token_id=PAD, **sizes)).eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"type 'olmo'.*set model\.backbone\.padded true") as refusal:
        build(tmp_path)
    assert "\n" not in str(refusal.value)
    padded = build(tmp_path, padded=True).eval()
    monkeypatch.setitem(PACKED, "olmo", True)
    packed = build(tmp_path).eval()
    assert packed.causal
    for backbone in (padded, packed):
        assert_near(segments(backbone(batch), batch), features_alone(model, batch))


def test_weights_of_an_encoder_within_a_whole_t5_are_found(tmp_path):
    whole = T5ForConditionalGeneration(small_config("t5"))
    whole.save_pretrained(tmp_path)
    table = build(tmp_path).model.get_input_embeddings().weight
    assert torch.equal(table, whole.get_input_embeddings().weight)


def test_rotary_frequencies_of_older_checkpoints_are_kept(tmp_path):
    """Published ESM-2 weights contain a copy per layer, rounded to fp16; the models were trained with these values."""
    network = save_masked_lm(tmp_path, "esm")
    rounded = network.esm.rotary_embeddings.inv_freq.half().float()
    path = tmp_path / "model.safetensors"
    state = {name: tensor for name, tensor in load_file(path).items() if "inv_freq" not in name}
    state |= {f"esm.encoder.layer.{i}.attention.self.rotary_embeddings.inv_freq": rounded.clone() for i in range(2)}
    save_file(state, path, metadata={"format": "pt"})
    assert torch.equal(build(tmp_path).model.rotary_embeddings.inv_freq, rounded)


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path):
    save_small_model(tmp_path, "bert")
    build_backbone(BackboneSection(source=str(tmp_path)), seed=0, vocabulary_size=VOCABULARY_SIZE)
    with pytest.raises(ConfigError, match=r"tokenizer has 41 tokens, but the embedding.*40"):
        build_backbone(BackboneSection(source=str(tmp_path)), seed=0, vocabulary_size=VOCABULARY_SIZE + 1)
    with pytest.raises(ConfigError, match="4096 tokens, but the embedding table of esm2_t6_8M has 33"):
        build_backbone(BackboneSection(source="esm2_t6_8M", **SMALL), seed=0, vocabulary_size=4096)


def _change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("kind", "changes", "error", "message"),
    [
        (
            "bert",
            {"model_type": "made_up"},
            ConfigError,
            "'made_up', which transformers does not have, and custom model",
        ),
        ("bert", {"is_decoder": True}, ConfigError, "a bert that is a decoder"),
        (
            "modernbert",
            {"layer_types": ["full_attention", "sliding_attention"]},
            ConfigError,
            "a modernbert that is a decoder or has sliding-window attention",
        ),
        ("bert", {"model_type": None}, ConfigError, "has no model_type"),
        ("bert", {"quantization_config": {"bits": 4}}, ConfigError, "are quantized"),
        ("bert", {"hidden_size": "many"}, ConfigError, "is not a valid bert config"),
        ("bert", {"num_hidden_layers": 3}, DataError, r"lack encoder\.layer\.2"),
        ("esm", {"intermediate_size": 128}, DataError, "do not have the shape"),
        ("esm", {"vocab_size": 64}, ConfigError, "vocab_size 64, but ESM-2 has 33"),
        ("esm", {"hidden_size": "32"}, ConfigError, "hidden_size: input should be"),
        ("esm", {"num_attention_heads": 3}, ConfigError, "not divisible by 3 heads"),
    ],
)
def test_a_config_that_its_weights_do_not_fit_is_refused(tmp_path, kind, changes, error, message):
    save_small_model(tmp_path, kind)
    _change_config(tmp_path, **changes)
    with pytest.raises(error, match=message) as refusal:
        build(tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_folder_of_an_adapter_or_of_damaged_weights_is_refused(tmp_path):
    save_small_model(tmp_path, "esm")
    path, adapter = tmp_path / "model.safetensors", tmp_path / "adapter_config.json"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"model\.safetensors: damaged"):
        build(tmp_path)
    _change_config(tmp_path, model_type="bert")
    adapter.write_text('{"base_model_name_or_path": "someone/elses"}')
    with pytest.raises(ConfigError, match="contains an adapter"):
        build(tmp_path)


@pytest.mark.parametrize("kind", ["bert", "esm"])
def test_neither_pickles_nor_code_of_a_folder_are_run(kind, tmp_path):
    folder, planted = tmp_path / "network", tmp_path / "planted"
    save_small_model(folder, kind)
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Malicious(planted)))
    _change_config(folder, auto_map={"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"})
    (folder / "evil.py").write_text(f"import os; os.mkdir({str(planted)!r})\nclass Evil: pass\n")
    build(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="are damaged, or a pickle that could run code"):
        build(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"other pickles than .* are never read"):
        build(folder)
    assert not planted.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "esm2_t6_8m"}, "did you mean esm2_t6_8M"),
        ({"source": "resnet"}, "use a size .esm2_t6_8M"),
        ({"source": "./nowhere"}, "folder ./nowhere not found"),
        ({"source": "esm2_t6_8M", "hidden_size": 64}, r"64 can't be split into 20 heads.*a multiple of 40"),
        ({"source": "esm2_t6_8M", "hidden_size": 20}, "a multiple of 40"),
        ({"source": "brt"}, "did you mean bert"),
        ({"source": "facebook/esm2_t6_8M_UR50D", "layers": 2}, "layers can't be set for trained weights"),
    ],
)
def test_an_impossible_source_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        read_config(BackboneSection(**settings), 33, 1)
    assert "\n" not in str(refusal.value)


def test_a_folder_without_a_config_that_can_be_read_is_refused(tmp_path):
    config = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config(BackboneSection(source=str(tmp_path)), 33, 1)
    for content in (b"{", b"[]", b"\xff", b"[" * 100_000):
        config.write_bytes(content)
        with pytest.raises(
            DataError, match=r"^.*config\.json: damaged \(.+\); give another model\.backbone\.source, .*$"
        ):
            read_config(BackboneSection(source=str(tmp_path)), 33, 1)
    with pytest.raises(ConfigError, match="is a file"):
        read_config(BackboneSection(source=str(config)), 33, 1)
