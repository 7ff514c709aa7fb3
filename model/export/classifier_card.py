"""The model card of an exported classifier, with the lines that give its outputs without Esmeray.

The lines use transformers, torch, safetensors and, for an adapter that was left as such, peft. They are what a reader
of the folder has to know of its head, and tests run them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from dataset.batches.cropping import FixedCrop, head_length
from model.export.model_card import card_section, with_versions
from model.tasks.classifier import Classifier

_PIPELINE_TAGS = {"per_residue": "token-classification"}
_ACTIVATIONS = {
    "multiclass": "logits.softmax(-1)",
    "binary": "logits.softmax(-1)",
    "multilabel": "logits.sigmoid()",
    "regression": "logits",
    "per_residue": "logits.softmax(-1)",
}
_SHOWN_NAMES = 20


@dataclass(frozen=True)
class Parts:
    """What the lines need to know of the folder.

    Attributes:
        text: an example, as the tokenizer takes it.
        prefix, suffix: special tokens before and after each text.
        base: of an adapter: folder or hub name of its base as Python source, else None.
        max_length: tokens of a text, without special ones, that are looked at; None: all of them.
        crop: which these are, of a longer text.
    """

    text: str
    prefix: int
    suffix: int
    base: str | None
    max_length: int | None = None
    crop: FixedCrop = "start"


def classifier_card(model: Classifier, parts: Parts, facts: Mapping[str, Any]) -> str:
    """README.md of the exported folder.

    Args:
        model: what is exported.
        parts: what the lines need to know.
        facts: further lines of the card by name; a mapping (such as ``metrics``) becomes a table.
    """
    kind = model.label_space.kind
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag=_PIPELINE_TAGS.get(kind, "text-classification"),
        tags=["esmeray", "classifier", kind.replace("_", "-")],
    )
    sections = [_description(model), *(card_section(name, value) for name, value in with_versions(facts).items())]
    sections.append(
        "## How to open it\n\nWith Esmeray, `python -m tools predict FOLDER FILE --output predictions.csv`, or\n\n"
        f"```python\n{_WITH_ESMERAY}```\n\n{_cropping(model, parts)}Without it:\n\n"
        f"```python\n{rebuilding_lines(model, parts)}```\n"
    )
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n" + "\n".join(sections)))


_WITH_ESMERAY = """from inference.classifier import ClassifierPipeline

predictions = ClassifierPipeline.load("FOLDER").predict(["MKTAYIAKQR"])
print(predictions.labels(), predictions.probabilities)
"""


def rebuilding_lines(model: Classifier, parts: Parts) -> str:
    """Python that computes ``logits`` and ``result`` for one text from the folder named FOLDER."""
    kind = model.label_space.kind
    opener = _opener(model)
    network = f"{opener}.from_pretrained({parts.base or 'folder'}{_without_pooler(model)})"
    if parts.base is not None:
        network = f"PeftModel.from_pretrained({network}, folder)"
    lines = [
        "import json",
        "",
        "import torch",
        *(["from peft import PeftModel"] if parts.base is not None else []),
        "from safetensors.torch import load_file",
        "from torch.nn import functional",
        f"from transformers import {opener}, AutoTokenizer",
        "",
        'folder = "FOLDER"',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        f"network = {network}.eval()",
        'head = load_file(f"{folder}/classifier.safetensors")',
        'names = json.load(open(f"{folder}/label_mappings.json"))["id2label"].values()',
        f'tokens = tokenizer("{parts.text}", return_tensors="pt")',
        *_crop(parts),
        "with torch.no_grad():",
        "    features = network(**tokens).last_hidden_state[0]",
        f"    inner = slice({parts.prefix}, len(features) - {parts.suffix})  # without special tokens",
        *(f"    {line}" for line in _pooling(model)),
        *(f"    {line}" for line in _hidden(model)),
        '    logits = pooled @ head["head.output.weight"].T + head["head.output.bias"]',
        f"result = {_ACTIVATIONS[kind]}  # {_columns(kind)}",
    ]
    return "\n".join(lines) + "\n"


def _opener(model: Classifier) -> str:
    """AutoModel, or the class itself where AutoModel means another one (T5's encoder)."""
    network = model.backbone.model
    return "AutoModel" if MODEL_MAPPING.get(type(network.config), None) is type(network) else type(network).__name__


def _without_pooler(model: Classifier) -> str:
    """The argument that leaves out transformers' own pooler where the backbone has none, and so no weights of one."""
    network = model.backbone.model
    takes_it = "add_pooling_layer" in inspect.signature(type(network).__init__).parameters
    return ", add_pooling_layer=False" if takes_it and getattr(network, "pooler", None) is None else ""


def _crop(parts: Parts) -> list[str]:
    """Lines that take the middle, or the end, out of longer texts; special tokens stay."""
    if parts.max_length is None:
        return []
    whole = parts.prefix + parts.max_length + parts.suffix
    gap = parts.prefix + head_length(parts.max_length, parts.crop)
    return [
        f'excess = max(0, tokens["input_ids"].shape[1] - {whole})  # tokens that are left out of a longer text',
        f"tokens = {{name: torch.cat((row[:, :{gap}], row[:, {gap} + excess :]), 1) for name, row in tokens.items()}}",
    ]


def _pooling(model: Classifier) -> list[str]:
    if model.per_residue:
        return ["pooled = features[inner]  # one row for each residue"]
    return {
        "mean": ["pooled = features[inner].mean(0)"],
        "max": ["pooled = features[inner].max(0).values"],
        "cls": ["pooled = features[0]"],
        "last": ["pooled = features[-1]"],
        "light_attention": [
            "residues = torch.zeros_like(features)",
            "residues[inner] = features[inner]",
            "values, scores = (",
            '    functional.conv1d(residues.T, head[f"{name}.weight"], head[f"{name}.bias"], padding="same").T[inner]',
            '    for name in ("light_attention.feature_convolution", "light_attention.attention_convolution")',
            ")",
            "pooled = torch.cat(((scores.softmax(0) * values).sum(0), values.max(0).values))",
        ],
    }[model.section.pooling]


def _hidden(model: Classifier) -> list[str]:
    if model.section.head == "linear":
        return []
    hidden = 'pooled @ head["head.hidden.weight"].T + head["head.hidden.bias"]'
    if model.light_attention is None:
        return [f"pooled = functional.gelu({hidden})"]
    return [
        f"pooled = functional.relu({hidden})",
        'norm = head["head.norm.weight"], head["head.norm.bias"]',
        "pooled = functional.layer_norm(pooled, pooled.shape[-1:], *norm)",
    ]


def _columns(kind: str) -> str:
    return {
        "regression": "a number for each of names",
        "per_residue": "a row for each residue that is looked at, a probability for each of names",
    }.get(kind, "a probability for each of names")


def _cropping(model: Classifier, parts: Parts) -> str:
    """What is left out of longer texts, as a paragraph."""
    if parts.max_length is None:
        return ""
    head = head_length(parts.max_length, parts.crop)
    tail = parts.max_length - head
    looked_at = f"the first {head:,} and the last {tail:,}" if tail else f"the first {head:,}"
    rows = " A residue that is left out has no row in `result`." if model.per_residue else ""
    return (
        f"Of a text of more than {parts.max_length:,} tokens, special ones not counted, {looked_at} are looked at, as "
        f"in the run's validation; these lines and those below do the same.{rows}\n\n"
    )


def _description(model: Classifier) -> str:
    config: Any = model.backbone.config
    layers = getattr(config, "num_hidden_layers", None) or getattr(config, "num_layers", "?")
    names = model.label_space.names
    more = f" and {len(names) - _SHOWN_NAMES} more (label_mappings.json)" if len(names) > _SHOWN_NAMES else ""
    section = model.section
    pooling = "" if model.per_residue else f", {section.pooling} pooling"
    what = {"regression": "Numbers", "per_residue": "Letters of each residue"}.get(model.label_space.kind, "Classes")
    shown = ", ".join(names[:_SHOWN_NAMES]) + more
    return (
        f"# Sequence classifier\n\nKind: {model.label_space.kind}. {what}: {shown}.\n\n"
        f"{type(model.backbone.model).__name__} with {layers} layers and {model.backbone.hidden_size} channels"
        f"{pooling}, {section.head} head.\n"
    )
