"""Residue tasks support the backbones of every family of transformers, and export them in transformers' format."""

import warnings

import pytest
import torch
from peft import PeftModel
from torch.nn import functional
from transformers import AutoModelForMaskedLM, AutoTokenizer, EsmTokenizer

from esmeray.common.errors import ConfigError
from esmeray.dataset.tokens.base import EsmSequenceTokenizer
from esmeray.dataset.tokens.esm import encode, pack_sequences
from esmeray.inference.models.opening import open_model
from esmeray.model.backbones.loading import residue_tokenizer
from esmeray.model.backbones.source import MASKED_LM_HEADS
from esmeray.model.export.backbone import export
from esmeray.model.heads.normalization import FeatureStatistics
from esmeray.model.section import BackboneSection
from esmeray.tasks.autoencoder.model import ESM2Autoencoder
from esmeray.tasks.section import ModelSection
from tests.dataset.tokenizer_folders import FOR_PROTEINS
from tests.model.small_models import save_masked_lm, save_small_model
from tests.model.support import (
    TINY_AUTOENCODER,
    assert_near,
    build_model,
    masked_batch,
    random_sequences,
    residue_batch,
    segments,
    tiny_section,
)

SEQUENCES = random_sequences([25, 1, 60])
DRAWN = {"layers": 2, "hidden_size": 32, "heads": 4}
MANY_LAYERS = {**DRAWN, "layers": 6}  # peft shortens the names of 20 adapted layers or more


def section(task, source, **settings):
    backbone = BackboneSection(source=str(source), **settings)
    return ModelSection(task=task, backbone=backbone, autoencoder=TINY_AUTOENCODER)


@torch.no_grad()
def logits_alone(network, tokens):
    return [network(input_ids=row[None]).logits[0] for row in tokens]


def tokenizer_of(folder):
    """Open a folder's tokenizer with AutoTokenizer, which (5.23) ignores the folder's class for a ModernBERT."""
    kind = EsmTokenizer if "modernbert" in (folder / "config.json").read_text() else AutoTokenizer
    return kind.from_pretrained(folder)


@pytest.mark.parametrize("source", [*MASKED_LM_HEADS, "drawn esmc", "drawn modernbert", "drawn bert"])
def test_a_masked_lm_of_every_family_is_that_of_transformers(source, tmp_path):
    networks = []
    if source.startswith("drawn "):
        model = build_model(section("masked_lm", source.removeprefix("drawn "), **DRAWN), seed=0)
    else:
        networks.append(save_masked_lm(tmp_path / "network", source))
        EsmSequenceTokenizer().save(tmp_path / "network")
        model = build_model(section("masked_lm", tmp_path / "network"), seed=0)
    batch = masked_batch(SEQUENCES, [0.15, 0.0, 0.4])
    model(batch).loss_sum.backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    exported = export(model.eval(), tmp_path / "export")
    assert "esmeray" not in (exported / "config.json").read_text()
    networks.append(AutoModelForMaskedLM.from_pretrained(exported).eval())
    with torch.no_grad():
        ours = segments(model.lm_head(model.backbone(batch)), batch)
    for network in networks:
        assert_near(ours, logits_alone(network, segments(batch.tokens, batch)))
    assert tokenizer_of(exported)(SEQUENCES[0])["input_ids"] == encode(SEQUENCES[0]).tolist()


@pytest.mark.parametrize("source", [*MASKED_LM_HEADS, "drawn esmc", "drawn esm2_t6_8M"])
def test_an_adapter_of_every_family_opens_in_peft_and_its_merged_weights_in_transformers(source, tmp_path):
    lora = {"rank": 4, "targets": ["all-linear"], "export": "adapter"}
    if source.startswith("drawn "):
        settings = section("masked_lm", source.removeprefix("drawn "), lora=lora, **MANY_LAYERS)
    else:
        layers = {"layer_types": ["full_attention"] * 6} if source == "modernbert" else {}
        save_masked_lm(tmp_path / "network", source, num_hidden_layers=6, **layers)
        EsmSequenceTokenizer().save(tmp_path / "network")
        settings = section("masked_lm", tmp_path / "network", lora=lora)
    model = build_model(settings, seed=0)
    batch = masked_batch(SEQUENCES, [0.15, 0.0, 0.4])
    model(batch).loss_sum.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(".lora_" in name and parameter.grad is not None for name, parameter in trained.items())
    for parameter in trained.values():  # initial zeros would hide a lost adapter
        torch.nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        wanted = segments(model.eval().lm_head(model.backbone(batch)), batch)
    adapter = export(model, tmp_path / "adapter")
    model.backbone.lora_export = "merged"
    merged = export(model, tmp_path / "merged")
    base = adapter / "base" if source.startswith("drawn ") else tmp_path / "network"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft only warns of missing weights
        adapted = PeftModel.from_pretrained(AutoModelForMaskedLM.from_pretrained(base), adapter)
    for network in (adapted.eval(), AutoModelForMaskedLM.from_pretrained(merged).eval()):
        assert_near(logits_alone(network, segments(batch.tokens, batch)), wanted)
    ours = [open_model(folder, device="cpu").embed(SEQUENCES, "logits") for folder in (adapter, merged)]
    for logits in zip(*ours, strict=True):
        assert_near(*map(torch.from_numpy, logits))


def test_another_vocabulary_is_read_through_a_table(tmp_path):
    """The ids of Rostlab/prot_bert differ from the ESM alphabet's."""
    folder = FOR_PROTEINS["prot_bert"](tmp_path / "prot_bert")
    network = save_masked_lm(folder, "bert", pad_token_id=0)
    settings = section("masked_lm", folder)
    model = build_model(settings, seed=0).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    hidden = [SEQUENCES[0][:3] + "X" + SEQUENCES[0][4:], *SEQUENCES[1:]]
    ids = [tokenizer(" ".join(text), return_tensors="pt")["input_ids"][0] for text in SEQUENCES]
    masked = [tokenizer(" ".join(text).replace("X", "[MASK]"), return_tensors="pt")["input_ids"][0] for text in hidden]
    alone = logits_alone(network, masked)
    batch = residue_batch(SEQUENCES)
    batch.tokens[pack_sequences(hidden).tokens == 24] = 32
    with torch.no_grad():
        assert_near(segments(model.lm_head(model.backbone(batch)), batch), alone)
    logits, targets = (torch.cat([rows[1:-1] for rows in tensors]) for tensors in (alone, ids))
    loss = functional.cross_entropy(logits, targets, reduction="sum")
    assert_near(model(batch).loss_sum.detach(), loss)

    exported = export(model, tmp_path / "export", residue_tokenizer(settings.backbone))
    again = build_model(section("masked_lm", exported), seed=1).eval()
    with torch.no_grad():
        assert torch.equal(again.lm_head(again.backbone(batch)), model.lm_head(model.backbone(batch)))
    assert_restored_whole(section("autoencoder", folder), tmp_path)


@pytest.mark.parametrize("kind", ["esm2_t6_8M", "esmc", "qwen2", "t5"])
def test_an_autoencoder_of_any_backbone_trains_and_is_restored_whole(kind, tmp_path):
    assert_restored_whole(section("autoencoder", kind, **DRAWN), tmp_path)


def assert_restored_whole(model_section, folder):
    model = build_model(model_section, seed=0)
    assert isinstance(model, ESM2Autoencoder)
    model(residue_batch(SEQUENCES)).loss_sum.backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    statistics = FeatureStatistics(model.backbone.hidden_size)
    model.measure(residue_batch(SEQUENCES), statistics)
    model.normalization.set(statistics)
    exported = export(model.eval(), folder / "autoencoder", residue_tokenizer(model_section.backbone))
    before = torch.random.get_rng_state()
    restored = ESM2Autoencoder.from_pretrained(exported)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not restored.training and restored.section == model.section
    assert type(restored.backbone.model) is type(model.backbone.model)
    state = restored.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, model.encode(SEQUENCES), restored.encode(SEQUENCES)))


def test_what_does_not_go_with_a_task_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"masked_lm needs an encoder with a .* head.*this is a qwen2 dec"):
        build_model(section("masked_lm", "qwen2", **DRAWN), seed=0)
    folder = FOR_PROTEINS["prot_t5"](tmp_path / "prot_t5")
    save_small_model(folder, "t5")
    save_small_model(tmp_path / "headless", "esm", vocab_size=33)
    with pytest.raises(ConfigError, match=r"lora\.rank: .*headless has no weights for the masked"):
        build_model(section("masked_lm", tmp_path / "headless", lora={"rank": 2}), seed=0)
    with pytest.raises(ConfigError, match="one before and one after"):
        build_model(section("autoencoder", folder), seed=0)


@pytest.mark.parametrize(("task", "loss"), [("autoencoder", 4.471039), ("masked_lm", 3.542034)])
def test_the_loss_at_a_fixed_seed_is_the_known_one(task, loss):
    """Reference values (fp32, CPU): a change that should not affect numerics must not change them."""
    batch = masked_batch(random_sequences([40, 1, 25]), [0.3, 0.0, 0.5])
    output = build_model(tiny_section(task), seed=0)(batch)
    assert (output.loss_sum / output.num_targets).item() == pytest.approx(loss, rel=1e-5)
