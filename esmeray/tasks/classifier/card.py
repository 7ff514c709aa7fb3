"""Model card of a classifier.

The code in the card computes the classifier's outputs without Esmeray, with transformers, torch and safetensors, and
peft for an adapter that was not merged. It documents the head for readers of the folder, and tests run it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from esmeray.dataset.batches.preparation import FixedCrop, head_length
from esmeray.model.backbones.lora import merged_state
from esmeray.model.export.model_card import model_card, opening_call, python_block
from esmeray.tasks.classifier.model import Classifier

_SHOWN_NAMES = 20
_WITH_ESMERAY = """import esmeray

predictions = esmeray.ClassifierPipeline.load("FOLDER").predict(["MKTAYIAKQR"])
print(predictions.labels(), predictions.probabilities)
"""

_WITHOUT_ESMERAY = """import json

import torch
{peft}from safetensors.torch import load_file
from torch.nn import functional
from transformers import {opener}, AutoTokenizer

folder = "FOLDER"
tokenizer = AutoTokenizer.from_pretrained(folder)
network = {network}.eval()
head = load_file(f"{{folder}}/classifier.safetensors")
names = json.load(open(f"{{folder}}/label_mappings.json"))["id2label"].values()
tokens = tokenizer("{text}", return_tensors="pt")
{crop}with torch.no_grad():
    features = network(**tokens).last_hidden_state[0]
    inner = slice({prefix}, len(features) - {suffix})  # without special tokens
{pooling}    logits = pooled @ head["head.output.weight"].T + head["head.output.bias"]
result = {result}
"""

_CROP = """\
excess = max(0, tokens["input_ids"].shape[1] - {whole})  # tokens that are left out of a longer text
tokens = {{name: torch.cat((row[:, :{gap}], row[:, {gap} + excess :]), 1) for name, row in tokens.items()}}
"""

_POOLING = {
    "mean": "pooled = features[inner].mean(0)\n",
    "max": "pooled = features[inner].max(0).values\n",
    "cls": "pooled = features[0]\n",
    "last": "pooled = features[-1]\n",
    "light_attention": """\
residues = torch.zeros_like(features)
residues[inner] = features[inner]
values, scores = (
    functional.conv1d(residues.T, head[f"{name}.weight"], head[f"{name}.bias"], padding="same").T[inner]
    for name in ("light_attention.feature_convolution", "light_attention.attention_convolution")
)
pooled = torch.cat(((scores.softmax(0) * values).sum(0), values.max(0).values))
""",
}
_HIDDEN = 'pooled = functional.{activation}(pooled @ head["head.hidden.weight"].T + head["head.hidden.bias"])\n'
_NORM = """\
norm = head["head.norm.weight"], head["head.norm.bias"]
pooled = functional.layer_norm(pooled, pooled.shape[-1:], *norm)
"""

_RESULTS = {
    "multilabel": "logits.sigmoid()  # a probability for each of names",
    "regression": "logits  # a number for each of names",
    "per_residue": "logits.softmax(-1)  # a row for each residue that is used, a probability for each of names",
}


@dataclass(frozen=True)
class Opening:
    """Facts about the folder that the code in the card needs.

    Attributes:
        text: example text in the form that the tokenizer takes.
        base: base of an adapter, a folder or hub name as Python source; None without an adapter.
        has_head: transformers opens the head as well; it would replace any other head by random weights.
        max_length: maximum number of tokens used of a text, without special tokens; None for all.
    """

    text: str
    base: str | None
    has_head: bool
    max_length: int | None
    crop: FixedCrop


def classifier_card(model: Classifier, opening: Opening, facts: Mapping[str, Any]) -> str:
    """Return README.md of the exported folder; ``facts`` as in :func:`model_card`."""
    kind = model.label_space.kind
    text = (
        "With Esmeray, `esmeray classify predict FOLDER --predict.input FILE --predict.output predictions.csv`, or\n\n"
        f"{python_block(_WITH_ESMERAY)}\n{_cropping(model, opening)}Without it:\n\n"
        f"{python_block(_lines(model, opening))}"
    )
    pipeline = "token-classification" if opening.has_head else None
    return model_card(pipeline, ["classifier", kind.replace("_", "-")], _description(model), facts, text)


def _lines(model: Classifier, opening: Opening) -> str:
    """Return Python code that computes ``logits`` and ``result`` of one text from the folder named FOLDER."""
    from esmeray.model.backbones.huggingface_loading import transformers_network

    network = transformers_network(model.backbone.model, merged_state(model.backbone.model))
    opener, call = opening_call(network, opening.base or "folder")
    if opening.has_head:  # avoids transformers' report of unused tensors
        opener = "AutoModelForTokenClassification"
        call = f"{opener}.from_pretrained(folder).base_model"
    crop = ""  # without Esmeray, too, texts are cropped as in the run's validation
    if opening.max_length is not None:
        crop = _CROP.format(
            whole=model.num_prefix + opening.max_length + model.num_suffix,
            gap=model.num_prefix + head_length(opening.max_length, opening.crop),
        )
    return _WITHOUT_ESMERAY.format(
        peft="from peft import PeftModel\n" if opening.base else "",
        opener=opener,
        # An adapter wraps its base, which may be in another folder.
        network=f"PeftModel.from_pretrained({call}, folder)" if opening.base else call,
        text=opening.text,
        crop=crop,
        prefix=model.num_prefix,
        suffix=model.num_suffix,
        # Indented, since it is inside the no_grad block.
        pooling=indent(_pooling(model), "    "),
        result=_RESULTS.get(model.label_space.kind, "logits.softmax(-1)  # a probability for each of names"),
    )


def _pooling(model: Classifier) -> str:
    pooled = _POOLING[model.section.pooling]
    if model.per_residue:
        # Per-residue classifiers require the setting mean, and pool nothing.
        pooled = "pooled = features[inner]  # one row for each residue\n"
    if model.section.head == "linear":
        return pooled
    # The hidden layer after light attention follows the paper, with ReLU and a norm.
    is_attentive = model.light_attention is not None
    return pooled + (_HIDDEN.format(activation="relu") + _NORM if is_attentive else _HIDDEN.format(activation="gelu"))


def _cropping(model: Classifier, opening: Opening) -> str:
    """Return a paragraph about the cropping of longer texts."""
    if opening.max_length is None:
        return ""
    head = head_length(opening.max_length, opening.crop)
    # 0 if only the beginning is kept.
    tail = opening.max_length - head
    used = f"the first {head:,} and the last {tail:,}" if tail else f"the first {head:,}"
    # Otherwise a reader would take row i for residue i.
    rows = " Cropped residues have no row in `result`." if model.per_residue else ""
    return (
        f"Texts of more than {opening.max_length:,} tokens, not counting special tokens, are cropped to {used} "
        f"tokens, as in the run's validation. The code above and below does the same.{rows}\n\n"
    )


def _description(model: Classifier) -> str:
    kind, names = model.label_space.kind, model.label_space.names
    # Thousands of terms would hide the rest of the card.
    more = f" and {len(names) - _SHOWN_NAMES} more (label_mappings.json)" if len(names) > _SHOWN_NAMES else ""
    # Residues are not pooled, whatever the setting is.
    pooling = "" if model.per_residue else f", {model.section.pooling} pooling"
    outputs = {"regression": "Numbers", "per_residue": "Letters of each residue"}.get(kind, "Classes")
    return (
        f"# Sequence classifier\n\nKind: {kind}. {outputs}: {', '.join(names[:_SHOWN_NAMES])}{more}.\n\n"
        f"{type(model.backbone.model).__name__} with {model.backbone.num_layers} layers and "
        f"{model.backbone.hidden_size} channels{pooling}, {model.section.head} head.\n"
    )
