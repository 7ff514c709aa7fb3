"""A trained model as a Hugging Face folder that others can open, and nothing of it pickled.

    config.json, model.safetensors    EsmForMaskedLM (masked_lm), EsmModel (the autoencoder's backbone), or those of
                                      another architecture
    vocab.txt, tokenizer_config.json  EsmTokenizer, or the tokenizer of the backbone's source
    autoencoder.safetensors, autoencoder_config.json  what ESM2Autoencoder.from_pretrained reads besides
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
from model.export.model_card import model_card
from model.tasks.autoencoder import ESM2Autoencoder
from model.tasks.base import TaskModel
from model.tasks.masked_lm import MaskedLM

_LONGEST_TOKENIZED = 1024
"""Tokens that EsmTokenizer truncates to when asked to, the length that ESM-2 was trained with."""


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

    Args:
        model: a masked language model or an autoencoder, with whole (not partitioned) weights. Left as it is.
        folder: final name; its parent is made if need be.
        tokenizer: of the backbone (:func:`model.backbones.residues.residue_tokenizer`); the ESM alphabet if None.
        resolved_config: the run's config as YAML, stored as config.yaml.
        model_card_facts: what the card tells besides the model itself: data, steps, metrics, versions.
        overwrite: replace an export of that name.

    Returns:
        The absolute path of the folder.

    Raises:
        ConfigError: the folder exists and ``overwrite`` is not set, or it is no export or was changed since.
        ResourceError: the disk is full or not writable; nothing is left behind.
    """
    target = Path(folder).expanduser().absolute()
    with exported_folder(target, overwrite) as building:
        _write(model, building, tokenizer or EsmSequenceTokenizer(), resolved_config, dict(model_card_facts or {}))
    return target


def _write(
    model: TaskModel, folder: Path, tokenizer: SequenceTokenizer, resolved_config: str | None, facts: dict[str, Any]
) -> None:
    with quiet_transformers():
        _huggingface_view(model).save_pretrained(folder)
    if isinstance(model, ESM2Autoencoder):
        model.save(folder)
    _write_tokenizer(tokenizer, folder)
    (folder / "README.md").write_text(
        model_card(model, facts, spaced=getattr(tokenizer, "spaced", False)), encoding="utf-8"
    )
    if resolved_config is not None:
        (folder / "config.yaml").write_text(resolved_config, encoding="utf-8")


def _huggingface_view(model: TaskModel) -> PreTrainedModel:
    """The Hugging Face model that holds the same parameters, to be saved; nothing is copied."""
    if isinstance(model, ESM2Autoencoder):
        network: PreTrainedModel = model.backbone.model
        return network
    if not isinstance(model, MaskedLM):
        raise TypeError(f"no Hugging Face form is known for {type(model).__name__}")
    return masked_lm_network(model.backbone, model.lm_head)


def _write_tokenizer(tokenizer: SequenceTokenizer, folder: Path) -> None:
    if not isinstance(tokenizer, EsmSequenceTokenizer):
        tokenizer.save(folder)
        return
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(VOCABULARY), encoding="utf-8")
    EsmTokenizer(str(vocabulary), model_max_length=_LONGEST_TOKENIZED).save_pretrained(folder)
