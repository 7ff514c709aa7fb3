"""Export a trained classifier as a Hugging Face folder that other tools can open, without pickles.

config.json, model.safetensors    the backbone, for AutoModel. With a linear head on each residue also the head and
                                  the class names, for AutoModelForTokenClassification
or adapter_config.json, adapter_model.safetensors  an adapter, for peft, which names its base
base/                             the adapter's base, if its weights were random and exist nowhere else
classifier.safetensors, classifier_config.json  weights and settings of pooling and head
label_mappings.json               kind of the labels and names of the classes
modules.json ...                  pooling for sentence-transformers (esmeray/model/export/backbone.py)
tokenizer files                   for AutoTokenizer
README.md                         model card, with code that computes the outputs without Esmeray
config.yaml                       the run's resolved config
esmeray_model.json                the task that opens the folder in Esmeray
esmeray.json                      list of these files, which identifies an export (common.publishing)

The code in the card computes the classifier's outputs without Esmeray, with transformers, torch and safetensors, and
peft for an adapter that was not merged. It documents the head for readers of the folder, and tests run it.
"""

from collections.abc import Mapping
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import yaml
from torch import Tensor

from esmeray.common.errors import expanded
from esmeray.dataset.batches.preparation import FixedCrop, fixed_crop, head_length
from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.dataset.section import DataSection
from esmeray.dataset.tokens.base import SequenceTokenizer, open_tokenizer
from esmeray.model.backbones.base import empty_weights
from esmeray.model.backbones.loading import build_backbone, drawn
from esmeray.model.backbones.lora import (
    base_folder,
    base_state,
    has_adapter,
    load_adapter,
    merged_state,
    write_adapter,
)
from esmeray.model.export.backbone import write_sentence_modules
from esmeray.model.export.exported_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    ClassifierSettings,
    exported_folder,
    read_settings,
    write_settings,
)
from esmeray.model.export.model_card import example_text, model_card, opening_call, python_block
from esmeray.model.section import BackboneSection
from esmeray.tasks.classifier.model import Classifier, LabelModel
from esmeray.train_config.removed import stored_in

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


def export_classifier(
    model: Classifier,
    folder: str | Path,
    tokenizer: SequenceTokenizer,
    resolved_config: str | None = None,
    facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``model`` as a Hugging Face folder. An adapter is merged or kept separate, depending on its settings.

    Returns the absolute path of the folder. Raises like :func:`~esmeray.model.export.exported_folder.exported_folder`.
    ``model``: with whole (not partitioned) weights; it is not changed. ``resolved_config``: config with the cropping
    for the card's code. ``facts``: sections of the card on data, steps, metrics and versions.
    """
    with exported_folder(folder, model.task, overwrite, resolved_config) as (building, target):
        base = None
        has_head = False
        if model.backbone.lora_export == "adapter":
            base = write_adapter(
                model.backbone,
                building,
                lambda folder: _write_network(model, folder, base_state(model.backbone.model)),
            )
        else:
            # Merge in a copy: the model's own adapter stays separate.
            has_head = _write_network(model, building, merged_state(model.backbone.model), with_head=True)
            write_sentence_modules(building, tokenizer, model.backbone.hidden_size, model.backbone.longest)
        write_head(
            model,
            building,
            type(model.backbone.model).__name__,
            hidden_size=model.backbone.hidden_size,
            padded=model.backbone.pads,
            num_prefix=model.num_prefix,
            num_suffix=model.num_suffix,
        )
        tokenizer.save(building)
        opening = Opening(example_text(tokenizer), base, has_head, *_cropping(resolved_config))
        (building / "README.md").write_text(classifier_card(model, opening, facts or {}), encoding="utf-8")
    return target


def load_classifier(folder: str | Path) -> tuple[Classifier, SequenceTokenizer]:
    """Load a classifier written by :func:`export_classifier`, with its tokenizer; in fp32 on the CPU, in evaluation
    mode.

    An adapter that was kept separate is loaded but not merged. Raises DataError (no classifier, another format version,
    damaged files, or a missing base of its adapter) or ResourceError (the hub, which has the base, can't be reached).
    """
    folder = expanded(folder).absolute()
    # Small files first: damage to them is found before gigabytes are read.
    settings = read_settings(folder)
    tokenizer = open_tokenizer(folder)
    label_space = LabelSpace.load(folder)
    adapted = has_adapter(folder)
    source = base_folder(folder) if adapted else folder
    with drawn(0):  # random weights are overwritten; the caller's random state must not change
        section = BackboneSection(source=str(source), padded=settings.padded)
        backbone = build_backbone(section, seed=0, vocabulary_size=tokenizer.vocabulary_size, pad=tokenizer.pad)
        if adapted:
            load_adapter(backbone, folder)
        model = Classifier(
            backbone,
            settings.classifier,
            label_space,
            num_prefix=settings.num_prefix,
            num_suffix=settings.num_suffix,
        )
    return model.load_own_weights(folder / WEIGHTS_FILE).eval(), tokenizer


def write_head(model: LabelModel, folder: Path, architecture: str, **network: Any) -> None:
    """Write weights and settings of pooling and head, and the class names. ``network``: settings of the backbone."""
    model.save_own_weights(folder / WEIGHTS_FILE)
    settings = ClassifierSettings(architecture=architecture, classifier=model.section, **network)
    write_settings(folder / CONFIG_FILE, settings.model_dump(mode="json"))
    model.label_space.save(folder)


def _write_network(model: Classifier, folder: Path, state: dict[str, Tensor], *, with_head: bool = False) -> bool:
    """Write the backbone as config.json and model.safetensors, with the head if a transformers class computes the same.

    Returns whether the head is included. Only then config.json contains the class names: for any other head
    transformers would create a random one with these names.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING  # here: it takes seconds

    from esmeray.model.backbones.huggingface_loading import save_network, transformers_network

    network = transformers_network(model.backbone.model, state)
    kind: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(network.config), None)
    if kind and with_head and model.per_residue and model.section.head == "linear":
        names = dict(enumerate(model.label_space.names))
        config = type(network.config).from_dict({**network.config.to_dict(), "id2label": names})
        config.label2id = {name: index for index, name in names.items()}
        with empty_weights():
            whole = kind(config)
        own = {f"{whole.base_model_prefix}.{name}": tensor for name, tensor in state.items()}
        own |= {
            f"classifier.{name}": tensor for name, tensor in model.head.get_submodule("output").state_dict().items()
        }
        expected = whole.state_dict().keys()
        if expected <= own.keys():  # e.g. heads of decoders have other parameters
            save_network(whole, folder, {name: own[name] for name in expected})
            return True
    save_network(network, folder, state)
    return False


def _cropping(resolved_config: str | None) -> tuple[int | None, FixedCrop]:
    """Return the maximum number of tokens used of a text (None for all), and which part of a longer text is used."""
    if resolved_config is None:
        return None, "start"
    data = DataSection.model_validate(
        (yaml.safe_load(resolved_config) or {}).get("data", {}), context=stored_in(Path("config.yaml"))
    )
    return data.max_length, fixed_crop(data.crop)


class Opening(NamedTuple):
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
        f"{python_block(_WITH_ESMERAY)}\n{_cropping_text(model, opening)}Without it:\n\n"
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


def _cropping_text(model: Classifier, opening: Opening) -> str:
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
