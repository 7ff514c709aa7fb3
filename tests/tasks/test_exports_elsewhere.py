"""Exports open in other programs: transformers, its pipelines, sentence-transformers and plain safetensors."""

from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline
from transformers.utils import logging

from esmeray.inference.classifier import ClassifierPipeline
from esmeray.inference.models.opening import open_model
from esmeray.model.backbones.loading import residue_tokenizer
from esmeray.model.export.backbone import export
from esmeray.tasks.classifier.export import export_classifier
from esmeray.tasks.masked_lm.model import MaskedLM
from esmeray.tasks.section import ModelSection
from tests.classifiers import NAMES, tiny_classifier
from tests.dataset.tokenizer_folders import prot_bert
from tests.model.small_models import save_masked_lm
from tests.model.support import random_sequences, tiny_section

PROTEINS = random_sequences([25, 3, 60])
OF_A_LAYER = {
    f"{module}.{parameter}"
    for module in (
        *(f"attention.self.{name}" for name in ("query", "key", "value")),
        *("attention.output.dense", "attention.LayerNorm", "intermediate.dense", "output.dense", "LayerNorm"),
    )
    for parameter in ("weight", "bias")
} | {"attention.self.rotary_embeddings.inv_freq"}
"""Names of a layer's tensors in facebook/esm2_t6_8M_UR50D, after the prefix ``esm.encoder.layer.0.``."""
FACTS = {"run": "lm", "license": "mit", "base_model": "facebook/esm2_t6_8M_UR50D", "data": "sample", "split": "a tenth"}


def export_masked_lm(kind: str, folder: Path) -> Path:
    section = tiny_section("masked_lm")
    if kind == "bert":  # a vocabulary with residues as words
        save_masked_lm(folder / "base", "bert")
        prot_bert(folder / "vocabulary")
        for name in ("vocab.txt", "tokenizer_config.json"):
            (folder / "base" / name).write_text((folder / "vocabulary" / name).read_text())
        section = ModelSection.model_validate({"task": "masked_lm", "backbone": {"source": str(folder / "base")}})
    facts = {**FACTS, "metrics": {"loss": 2.5, "perplexity": float("inf")}}
    tokenizer = residue_tokenizer(section.backbone)
    return export(MaskedLM.build(section, 4).eval(), folder / "lm", tokenizer, model_card_facts=facts)


@pytest.fixture(scope="module", params=["esm", "bert"])
def masked_lm(request, tmp_path_factory) -> tuple[Path, list[str]]:
    """An export, and proteins in its tokenizer's notation."""
    folder = export_masked_lm(request.param, tmp_path_factory.mktemp(request.param))
    return folder, [" ".join(text) if request.param == "bert" else text for text in PROTEINS]


@torch.no_grad()
def test_transformers_gives_the_vectors_and_logits_of_an_export(masked_lm):
    folder, texts = masked_lm
    logging.set_verbosity_error()
    ours = open_model(folder, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network, whole = AutoModel.from_pretrained(folder).eval(), AutoModelForMaskedLM.from_pretrained(folder).eval()
    pairs = zip(texts, ours.embed(PROTEINS, "residues"), ours.embed(PROTEINS, "logits"), strict=True)
    for text, residues, logits in pairs:
        tokens = tokenizer(text, return_tensors="pt")
        np.testing.assert_allclose(network(**tokens).last_hidden_state[0, 1:-1], residues, atol=1e-5)
        np.testing.assert_allclose(whole(**tokens).logits[0, 1:-1], logits, atol=1e-5)
    hidden = texts[0].replace(texts[0][0], tokenizer.mask_token, 1)
    (best, *_) = pipeline("fill-mask", folder)(hidden, top_k=1)
    tokens = tokenizer(hidden, return_tensors="pt")
    assert best["token"] == int(whole(**tokens).logits[0, 1].argmax())


def test_sentence_transformers_pools_an_export_as_esmeray_does(masked_lm):
    from sentence_transformers import SentenceTransformer  # a slow import

    folder, texts = masked_lm
    long = random_sequences([1500]) if "esm" in folder.parent.name else []  # longer than its tokenizer's limit
    theirs = SentenceTransformer(str(folder), device="cpu").encode([*texts, *long])
    np.testing.assert_allclose(theirs, open_model(folder, device="cpu").embed([*PROTEINS, *long]), atol=1e-5)


def test_tensors_of_an_export_have_the_names_of_the_hub(masked_lm):
    names = load_file(masked_lm[0] / "model.safetensors").keys()
    assert not any("*" in name or "gamma" in name or "beta" in name for name in names)
    if AutoConfig.from_pretrained(masked_lm[0]).model_type == "esm":
        for prefix in ("esm.encoder.layer.0.", "esm.encoder.layer.1."):
            assert {name.removeprefix(prefix) for name in names if name.startswith(prefix)} == OF_A_LAYER
        rest = {name for name in names if ".layer." not in name}
        assert {"esm.embeddings.word_embeddings.weight", "lm_head.dense.weight", "lm_head.bias"} <= rest


def test_a_card_has_license_base_split_and_metrics_as_the_hub_reads(masked_lm):
    card = ModelCard.load(masked_lm[0] / "README.md")
    assert (card.data.license, card.data.base_model, card.data.pipeline_tag) == (
        "mit",
        FACTS["base_model"],
        "fill-mask",
    )
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("sample", "loss", 2.5), "none is infinite"
    assert "a tenth" in card.text and "model-index" in (masked_lm[0] / "README.md").read_text()


@pytest.mark.parametrize("source", ["esm2_t6_8M", "bert"])
def test_a_linear_head_on_residues_is_transformers_own_class(tmp_path, source):
    model, tokenizer = tiny_classifier(source, kind="per_residue")
    folder = export_classifier(model, tmp_path / "model", tokenizer)
    assert AutoConfig.from_pretrained(folder).id2label == dict(enumerate(NAMES["per_residue"]))
    ours = ClassifierPipeline.load(folder, device="cpu").predict(PROTEINS)
    for _ in range(2):  # each opening must give the same
        theirs = pipeline("token-classification", folder, ignore_labels=[])(PROTEINS)
        assert ["".join(residue["entity"] for residue in protein) for protein in theirs] == ours.labels()
        scores = [residue["score"] for protein in theirs for residue in protein]
        np.testing.assert_allclose(scores, ours.probabilities.max(-1), atol=1e-5)


@pytest.mark.parametrize("classifier", [{}, {"pooling": "cls"}, {"head": "mlp"}])
def test_any_other_head_is_not_promised_to_transformers(tmp_path, classifier):
    kind = "per_residue" if "head" in classifier else "multiclass"
    model, tokenizer = tiny_classifier(kind=kind, classifier=classifier)
    folder = export_classifier(model, tmp_path / "model", tokenizer)
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == ["EsmModel"] and config.id2label == {0: "LABEL_0", 1: "LABEL_1"}
    assert ModelCard.load(folder / "README.md").data.pipeline_tag is None
    head = load_file(folder / "classifier.safetensors")
    assert torch.equal(head["head.output.weight"], model.head.output.weight)


def test_an_export_of_before_with_other_names_is_still_read(tmp_path, monkeypatch):
    folder = export_masked_lm("esm", tmp_path)
    expected = open_model(folder, device="cpu").embed(PROTEINS)
    AutoModelForMaskedLM.from_pretrained(folder).save_pretrained(folder)
    assert any("*" in name for name in load_file(folder / "model.safetensors")), "as transformers writes them"
    (folder / "esmeray.json").unlink()
    np.testing.assert_array_equal(open_model(folder, device="cpu").embed(PROTEINS), expected)
