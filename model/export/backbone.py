"""A trained model as a Hugging Face folder that others can open, and nothing of it pickled.

    config.json, model.safetensors    EsmForMaskedLM (masked_lm), EsmModel (the autoencoder's backbone), or those of
                                      another architecture
    vocab.txt, tokenizer_config.json  EsmTokenizer, or the tokenizer of the backbone's source
    autoencoder.safetensors, autoencoder_config.json  read by ESM2Autoencoder.from_pretrained besides
    README.md                         model card
    config.yaml                       the run's resolved config
    esmeray.json                      list of these files, by which an export is known (common.publishing)

The folder is built under a temporary name beside its own, flushed to the disk and renamed: a killed export leaves
nothing under the final name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import EsmTokenizer, PreTrainedModel

from dataset.tokens.base import EsmSequenceTokenizer, SequenceTokenizer
from dataset.tokens.esm import VOCABULARY
from model.backbones.loading import masked_lm_network, quiet_transformers
from model.export.exported_folder import exported_folder
from model.export.model_card import example_text, model_card, opening_call, python_block
from model.tasks.autoencoder import ESM2Autoencoder
from model.tasks.base import TaskModel
from model.tasks.diffusion import SequenceDiffusion
from model.tasks.masked_lm import MaskedLM

_LONGEST_TOKENIZED = 1024
"""Tokens that EsmTokenizer truncates to when asked to, the length that ESM-2 was trained with."""

_OPEN_AUTOENCODER = """from model.tasks.autoencoder import ESM2Autoencoder

autoencoder = ESM2Autoencoder.from_pretrained("FOLDER")
latents = autoencoder.encode(["MKTAYIAKQR"])       # one (residues, channels) tensor for each sequence
features, residue_logits = autoencoder.decode(latents)
"""

_OPEN_DIFFUSION = """from model.tasks.diffusion import open_diffusion

model = open_diffusion("FOLDER")
"""

_OPEN_NETWORK = """from transformers import AutoTokenizer, {opener}

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
network = {call}
{output} = network(**tokenizer("{text}", return_tensors="pt")).{attribute}
"""


def export(
    model: TaskModel,
    folder: str | Path,
    tokenizer: SequenceTokenizer | None = None,
    *,
    resolved_config: str | None = None,
    model_card_facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``model`` as a Hugging Face folder.

    Returns the absolute path of the folder. Raises ConfigError (the folder exists and ``overwrite`` is not set, or it
    is no export or was changed since) or ResourceError (the disk is full or not writable; nothing is left behind).
    ``model``: a masked language model or an autoencoder, with whole (not partitioned) weights. Left as it is.
    ``tokenizer``: of the backbone (:func:`model.backbones.residues.residue_tokenizer`); the ESM alphabet if None.
    ``resolved_config``: the run's config as YAML, stored as config.yaml. ``model_card_facts``: sections of the card on
    data, steps, metrics and versions.
    """
    with exported_folder(folder, overwrite, resolved_config) as (building, target):
        tokenizer = tokenizer or EsmSequenceTokenizer()
        network = _huggingface_view(model)
        with quiet_transformers():
            network.save_pretrained(building)
        if isinstance(model, ESM2Autoencoder | SequenceDiffusion):
            model.save(building)
        _write_tokenizer(tokenizer, building)
        card = _card(model, network, example_text(tokenizer), model_card_facts or {})
        (building / "README.md").write_text(card, encoding="utf-8")
    return target


def _huggingface_view(model: TaskModel) -> PreTrainedModel:
    """The Hugging Face model that holds the same parameters, to be saved; nothing is copied."""
    if isinstance(model, ESM2Autoencoder):
        network: PreTrainedModel = model.backbone.model
        return network
    if not isinstance(model, MaskedLM | SequenceDiffusion):
        raise TypeError(f"no Hugging Face form is known for {type(model).__name__}")
    return masked_lm_network(model.backbone, model.lm_head)


def _write_tokenizer(tokenizer: SequenceTokenizer, folder: Path) -> None:
    if not isinstance(tokenizer, EsmSequenceTokenizer):
        tokenizer.save(folder)
        return
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(VOCABULARY), encoding="utf-8")
    EsmTokenizer(str(vocabulary), model_max_length=_LONGEST_TOKENIZED).save_pretrained(folder)


def _card(model: TaskModel, network: PreTrainedModel, text: str, facts: Mapping[str, Any]) -> str:
    config = model.backbone.config
    family = "ESM-2" if config.model_type == "esm" else type(model.backbone.model).__name__
    tags = ["protein", "esm2" if config.model_type == "esm" else config.model_type]
    size = f"{config.num_hidden_layers} layers, {config.hidden_size} channels, {config.num_attention_heads} heads"
    opener, call = opening_call(network, '"FOLDER"')
    lines = {"opener": opener, "call": call, "text": text}
    if isinstance(model, SequenceDiffusion):
        description = (
            f"# Sequences for a structure\n\nMasked diffusion on {family} with {size}, conditioned "
            "on a backbone structure. The network alone, without what reads the structure, is config.json's.\n"
        )
        opening = (
            python_block(_OPEN_DIFFUSION)
            + "\nor `python -m tools generate FOLDER --structure FILE --output DESIGNS`.\n"
        )
        return model_card("text-generation", [*tags, "inverse-folding"], description, facts, opening)
    if not isinstance(model, ESM2Autoencoder):
        title = f"# {family} masked language model"
        description = f"{title}\n\n{family} with {size}, which predicts hidden residues of proteins.\n"
        opening = python_block(_OPEN_NETWORK.format(**lines, output="logits", attribute="logits"))
        return model_card("fill-mask", [*tags, "masked-lm"], description, facts, opening)
    description = (
        f"# {family} autoencoder\n\nCompresses the features of each residue from {model.backbone.hidden_size} to "
        f"{model.latent_size} channels ({model.compression_ratio:g} times) and reconstructs features and residues. "
        f"The backbone is {family} with {size}.\n"
    )
    alone = python_block(_OPEN_NETWORK.format(**lines, output="features", attribute="last_hidden_state"))
    opening = f"{python_block(_OPEN_AUTOENCODER)}\nThe backbone alone, without Esmeray:\n\n{alone}"
    return model_card("feature-extraction", [*tags, "autoencoder"], description, facts, opening)
