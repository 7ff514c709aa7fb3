"""An exported classifier opens with transformers and peft only, gives the same outputs, and is restored completely."""

import json
import logging
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from esmeray.common.errors import DataError
from esmeray.common.publishing import MADE_FILE
from esmeray.dataset.tokens.esm import packed_from_tokens
from esmeray.inference.classifier import ClassifierPipeline
from esmeray.model.export.backbone import export
from esmeray.tasks.autoencoder.model import ESM2Autoencoder
from esmeray.tasks.classifier.export import export_classifier, load_classifier
from tests.classifiers import NAMES, TEXTS, classifier_config, export_tiny, tiny_classifier
from tests.model.small_models import save_masked_lm
from tests.model.support import assert_near, build_model, random_sequences, tiny_section

PROTEINS = random_sequences([25, 3, 60])
LORA = {"rank": 4, "targets": ["attention"]}


def packed(tokenizer, text):
    tokens = np.array([*tokenizer.prefix, *tokenizer.encode([text])[0].tolist(), *tokenizer.suffix])
    return packed_from_tokens(tokens, np.array([tokens.size]))


def card_names(folder: Path, text: str) -> dict:
    """Run the last Python block of the model card on this text; return its variables."""
    lines = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)[-1]
    assert "esmeray" not in lines and "from model" not in lines and "from dataset" not in lines
    lines = lines.replace('"FOLDER"', repr(str(folder)))
    lines, replaced = re.subn(r'tokenizer\(".*?", ', f"tokenizer({text!r}, ", lines)
    assert replaced == 1
    names: dict = {}
    exec(compile(lines, "card", "exec"), names)  # noqa: S102
    return names


@torch.no_grad()
def own_logits(model, tokenizer, text):
    logits = model.logits(packed(tokenizer, text))
    if not model.per_residue:
        return logits[0]
    return logits[len(tokenizer.prefix) : len(logits) - len(tokenizer.suffix)]


def assert_card_gives_the_same(folder, model, tokenizer):
    for text in PROTEINS if tokenizer.one_token_per_residue else TEXTS:
        expected = own_logits(model, tokenizer, text)
        assert_near(card_names(folder, text)["logits"], expected)


MODELS: dict[str, dict] = {kind: {"kind": kind} for kind in NAMES} | {
    "max": {"classifier": {"pooling": "max"}},
    "cls": {"classifier": {"pooling": "cls", "head": "mlp"}},
    "last": {"classifier": {"pooling": "last"}},
    "attentive": {"classifier": {"pooling": "light_attention", "light_attention_kernel": 4, "head": "mlp"}},
    "t5": {"source": "t5", "classifier": {"head": "mlp"}},
    "merged qwen2": {"source": "qwen2", "backbone": {"lora": {**LORA, "export": "merged"}}},
    "adapted bert": {"source": "bert", "backbone": {"lora": {**LORA, "export": "adapter"}}},
    "adapted t5": {"source": "t5", "backbone": {"lora": {**LORA, "export": "adapter"}}},
}


@pytest.mark.parametrize("name", MODELS)
def test_an_export_gives_the_same_by_its_card_and_restored(tmp_path, name, caplog, monkeypatch):
    model, tokenizer = tiny_classifier(**MODELS[name])
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    folder = export_classifier(model, tmp_path / "model", tokenizer, "run:\n  name: a\n", {"data": "10,000 proteins"})
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger("transformers"), "propagate", True)
        assert_card_gives_the_same(folder, model, tokenizer)
    assert not caplog.records, "such as weights of a pooler that are made up"
    card, names = (folder / "README.md").read_text(), model.label_space.names
    assert ", ".join(names) in card and "10,000 proteins" in card
    assert (folder / "config.yaml").read_text() == "run:\n  name: a\n"
    if not name.startswith("adapted"):
        text = (folder / "config.json").read_text()
        assert "esmeray" not in text and "_attn_implementation" not in text
        assert ("pipeline_tag: token-classification" in card) == (name == "per_residue")
    suffixes = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors", ".txt", ".md", ".yaml"}

    random_state = torch.random.get_rng_state()
    restored, same_tokenizer = load_classifier(folder)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert not restored.training and hasattr(restored.backbone.model, "peft_config") == name.startswith("adapted")
    assert (restored.section, restored.label_space) == (model.section, model.label_space)
    assert same_tokenizer.fingerprint == tokenizer.fingerprint
    automatic = AutoTokenizer.from_pretrained(folder)
    for text in PROTEINS if tokenizer.one_token_per_residue else TEXTS:
        expected, actual = own_logits(model, tokenizer, text), own_logits(restored, same_tokenizer, text)
        if name == "merged qwen2" or name == "regression":  # LoRA or the scale is merged into weights
            assert_near(actual, expected)
        else:
            assert torch.equal(actual, expected)
        if "t5" not in name:
            assert automatic(text)["input_ids"] == packed(tokenizer, text).tokens.tolist()


@pytest.mark.parametrize(
    ("source", "kind", "crop"), [("esm2_t6_8M", "per_residue", "random"), ("qwen2", "multiclass", "ends")]
)
def test_the_card_crops_longer_texts_as_predict_does(tmp_path, source, kind, crop):
    kept = 5
    content = "protein" if source.startswith("esm2") else "text"
    config = classifier_config(kind, content, max_length=kept, crop=crop)
    folder = export_tiny(tmp_path / "model", config, source=source)
    made = ClassifierPipeline.load(folder, device="cpu")
    texts = random_sequences([4, 5, 6, 30]) if source.startswith("esm2") else TEXTS
    cropped = made.predict(texts).cropped
    assert cropped.any() and not cropped.all()
    for text in texts:
        expected = torch.from_numpy(made.predict([text]).probabilities)
        assert_near(card_names(folder, text)["result"].reshape(-1, expected.shape[1]), expected)
    card = " ".join((folder / "README.md").read_text().split())
    part = "the first 3 and the last 2" if crop == "ends" else "the first 5"
    assert f"Texts of more than 5 tokens, not counting special tokens, are cropped to {part} tokens" in card
    assert ("Cropped residues have no row in `result`." in card) == (kind == "per_residue")


def test_an_adapter_of_loaded_weights_names_their_folder(tmp_path):
    save_masked_lm(tmp_path / "base", "esm")
    model, tokenizer = tiny_classifier(str(tmp_path / "base"), backbone={"lora": {**LORA, "export": "adapter"}})
    folder = export_classifier(model, tmp_path / "model", tokenizer)
    assert not (folder / "base").exists() and not (folder / "model.safetensors").exists()
    assert_card_gives_the_same(folder, model, tokenizer)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")
    (tmp_path / "base").rename(tmp_path / "gone")
    with pytest.raises(DataError, match=r"the adapter's base model .*base is missing"):
        load_classifier(folder)


def test_an_adapter_of_weights_from_the_hub_names_them_and_their_revision(tmp_path):
    model, tokenizer = tiny_classifier(backbone={"lora": {**LORA, "export": "adapter"}})
    revision = "c731040fcd8d73dceaa04b0a8e6329b345b0f5df"
    model.backbone.config._name_or_path = f"/cache/hub/models--facebook--esm2_t6_8M_UR50D/snapshots/{revision}"
    folder = export_classifier(model, tmp_path / "model", tokenizer)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("facebook/esm2_t6_8M_UR50D", revision)
    assert not (folder / "base").exists()
    card = (folder / "README.md").read_text()
    assert f"from_pretrained('facebook/esm2_t6_8M_UR50D', revision='{revision}', add_pooling_layer=False)" in card


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, Path]:
    """Exports by name of their settings file, without the manifest: its checksums would be refused first."""
    folder = tmp_path_factory.mktemp("exported")
    autoencoder = export(build_model(tiny_section("autoencoder"), seed=0), folder / "autoencoder")
    folders = {"classifier": export_tiny(folder / "classifier"), "autoencoder": autoencoder}
    for exported in folders.values():
        (exported / MADE_FILE).unlink()
    return folders


OPENERS = {"classifier": load_classifier, "autoencoder": ESM2Autoencoder.from_pretrained}


@pytest.mark.parametrize(
    ("kind", "file", "old", "new", "message"),
    [
        ("classifier", "classifier_config.json", '"pooling"', '"pulling"', r"classifier_config\.json: damaged \("),
        ("classifier", "classifier_config.json", '"linear"', '"mlp"', "does not match"),
        ("classifier", "label_mappings.json", "{", "", "damaged"),
        ("autoencoder", "autoencoder_config.json", '_version": 1', '_version": 2', "format version 2"),
        ("autoencoder", "autoencoder_config.json", '"hidden_sizes"', '"hidden"', r"_config\.json: damaged \("),
        ("autoencoder", "autoencoder_config.json", "24", "23", "does not match"),
    ],
)
def test_damaged_files_are_refused(tmp_path, exports, kind, file, old, new, message):
    (other,) = exports.keys() - {kind}
    with pytest.raises(DataError, match=rf"contains no {kind}"):
        OPENERS[kind](exports[other])
    folder = shutil.copytree(exports[kind], tmp_path / "model")
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=message):
        OPENERS[kind](folder)
