"""Export a trained classifier as a Hugging Face folder that other tools can open, without pickles.

config.json, model.safetensors    the backbone, for AutoModel. With a linear head on each residue also the head and
                                  the class names, for AutoModelForTokenClassification
or adapter_config.json, adapter_model.safetensors  an adapter, for peft, which names its base
base/                             the adapter's base, if its weights were random and exist nowhere else
classifier.safetensors, classifier_config.json  weights and settings of pooling and head
label_mappings.json               kind of the labels and names of the classes
modules.json ...                  pooling for sentence-transformers (esmeray/model/export/sentence_modules.py)
tokenizer files                   for AutoTokenizer
README.md                         model card, with code that computes the outputs without Esmeray
config.yaml                       the run's resolved config
esmeray_model.json                the task that opens the folder in Esmeray
esmeray.json                      list of these files, which identifies an export (common.publishing)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from esmeray.common.errors import expanded
from esmeray.dataset.batches.preparation import FixedCrop, fixed_crop
from esmeray.dataset.section import DataSection
from esmeray.dataset.targets import LabelSpace
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
from esmeray.model.export.exported_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    ClassifierSettings,
    exported_folder,
    read_settings,
    write_settings,
)
from esmeray.model.export.model_card import example_text
from esmeray.model.export.sentence_modules import write_sentence_modules
from esmeray.model.section import BackboneSection
from esmeray.tasks.classifier.card import Opening, classifier_card
from esmeray.tasks.classifier.model import Classifier, LabelModel
from esmeray.train_config.removed import stored_in


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
    model.load_own_weights(folder / WEIGHTS_FILE)
    return model.eval(), tokenizer


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
