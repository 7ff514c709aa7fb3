"""A trained model as a Hugging Face folder that others can open, and nothing of it pickled.

    config.json, model.safetensors    EsmForMaskedLM (masked_lm) or EsmModel (the autoencoder's backbone)
    vocab.txt, tokenizer_config.json  EsmTokenizer
    autoencoder.safetensors, autoencoder_config.json  read by ESM2Autoencoder.from_pretrained besides
    README.md                         model card
    config.yaml                       the run's resolved config
    esmeray.json                      list of these files, by which an export is known (common.publishing)

The folder is built under a temporary name beside its own, flushed to the disk and renamed: a killed export leaves
nothing under the final name.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import EsmForMaskedLM, EsmTokenizer, PreTrainedModel

from dataset.tokens.esm import VOCABULARY
from model.backbones.esm2 import quiet_transformers
from model.export.exported_folder import exported_folder
from model.export.model_card import model_card, python_block
from model.tasks.autoencoder import ESM2Autoencoder
from model.tasks.base import TaskModel
from model.tasks.masked_lm import MaskedLM

_LONGEST_TOKENIZED = 1024
"""Tokens that EsmTokenizer truncates to when asked to, the length that ESM-2 was trained with."""

_OPEN_AUTOENCODER = """from model.tasks.autoencoder import ESM2Autoencoder

autoencoder = ESM2Autoencoder.from_pretrained("FOLDER")
latents = autoencoder.encode(["MKTAYIAKQR"])       # one (residues, channels) tensor for each sequence
features, residue_logits = autoencoder.decode(latents)
"""

_OPEN_BACKBONE = """from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
backbone = AutoModel.from_pretrained("FOLDER", add_pooling_layer=False)
features = backbone(**tokenizer("MKTAYIAKQR", return_tensors="pt")).last_hidden_state
"""

_OPEN_MASKED_LM = """from transformers import AutoTokenizer, EsmForMaskedLM

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
network = EsmForMaskedLM.from_pretrained("FOLDER")
logits = network(**tokenizer("MKTAYIAKQR", return_tensors="pt")).logits
"""


def export(
    model: TaskModel,
    folder: str | Path,
    *,
    resolved_config: str | None = None,
    model_card_facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``model`` as a Hugging Face folder.

    Args:
        model: a masked language model or an autoencoder, with whole (not partitioned) weights. Left as it is.
        folder: final name; its parent is made if need be.
        resolved_config: the run's config as YAML, stored as config.yaml.
        model_card_facts: sections of the card on data, steps, metrics and versions.
        overwrite: replace an export of that name.

    Returns:
        The absolute path of the folder.

    Raises:
        ConfigError: the folder exists and ``overwrite`` is not set, or it is no export or was changed since.
        ResourceError: the disk is full or not writable; nothing is left behind.
    """
    with exported_folder(folder, overwrite, resolved_config) as (building, target):
        with quiet_transformers():
            _huggingface_view(model).save_pretrained(building)
        if isinstance(model, ESM2Autoencoder):
            model.save(building)
        _write_tokenizer(building)
        (building / "README.md").write_text(_card(model, model_card_facts or {}), encoding="utf-8")
    return target


def _huggingface_view(model: TaskModel) -> PreTrainedModel:
    """The Hugging Face model that holds the same parameters, to be saved; nothing is copied."""
    if isinstance(model, ESM2Autoencoder):
        return model.backbone.model
    if not isinstance(model, MaskedLM):
        raise TypeError(f"no Hugging Face form is known for {type(model).__name__}")
    with torch.device("meta"):
        network = EsmForMaskedLM(copy.deepcopy(model.backbone.config))
    network.esm, network.lm_head = model.backbone.model, model.lm_head
    return network


def _write_tokenizer(folder: Path) -> None:
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(VOCABULARY), encoding="utf-8")
    EsmTokenizer(str(vocabulary), model_max_length=_LONGEST_TOKENIZED).save_pretrained(folder)


def _card(model: TaskModel, facts: Mapping[str, Any]) -> str:
    config = model.backbone.config
    size = f"{config.num_hidden_layers} layers, {config.hidden_size} channels, {config.num_attention_heads} heads"
    if not isinstance(model, ESM2Autoencoder):
        description = (
            f"# ESM-2 masked language model\n\nAn ESM-2 with {size}, which predicts hidden residues of proteins.\n"
        )
        return model_card(
            "fill-mask", ["protein", "esm2", "masked-lm"], description, facts, python_block(_OPEN_MASKED_LM)
        )
    description = (
        f"# ESM-2 autoencoder\n\nCompresses the features of each residue from {model.backbone.hidden_size} to "
        f"{model.latent_size} channels ({model.compression_ratio:g} times) and reconstructs features and residues. "
        f"The backbone is an ESM-2 with {size}.\n"
    )
    opening = (
        f"{python_block(_OPEN_AUTOENCODER)}\nThe backbone alone, without Esmeray:\n\n{python_block(_OPEN_BACKBONE)}"
    )
    return model_card("feature-extraction", ["protein", "esm2", "autoencoder"], description, facts, opening)
