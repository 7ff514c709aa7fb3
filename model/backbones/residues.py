"""Backbones for tasks on residues, whose batches come in the ESM alphabet whatever the backbone's own vocabulary is.

ESM-2, ESM C and random weights have the alphabet's ids. Any other backbone (ProtBERT ...) gets a table of its
own ids, which it looks tokens up in.
"""

from typing import Any

import torch
from torch import Tensor, nn

from common.errors import ConfigError
from dataset.tokens.base import EsmSequenceTokenizer, HuggingFaceTokenizer, SequenceTokenizer, open_tokenizer
from dataset.tokens.esm import CLS, EOS, FIRST_RESIDUE, LAST_RESIDUE, MASK, PAD, VOCABULARY
from dataset.tokens.model_folder import CONFIG_FILE, read_settings
from model.backbones.base import PackedBackbone
from model.backbones.loading import build_backbone, build_masked_lm
from model.backbones.source import SOURCE_KEY, config_folder, has_random_weights
from train_config.schema import BackboneSection


def residue_backbone(section: BackboneSection, seed: int, *, empty: bool = False) -> PackedBackbone:
    """The backbone of :func:`model.backbones.loading.build_backbone` for batches in the ESM alphabet.

    Raises ConfigError (as there, or its tokenizer does not give one token for each residue between two others) or
    DataError, ResourceError (as there).
    """
    tokenizer = residue_tokenizer(section)
    backbone = build_backbone(section, seed, tokenizer.vocabulary_size, tokenizer.pad, empty=empty)
    backbone.residue_ids = _residue_ids(tokenizer)
    return backbone


def residue_masked_lm(section: BackboneSection, seed: int, *, empty: bool = False) -> tuple[PackedBackbone, nn.Module]:
    """The same with the head of :func:`model.backbones.loading.build_masked_lm`, which raises besides."""
    tokenizer = residue_tokenizer(section)
    backbone, head = build_masked_lm(section, seed, tokenizer.vocabulary_size, tokenizer.pad, empty=empty)
    backbone.residue_ids = _residue_ids(tokenizer)
    return backbone, head


def residue_tokenizer(section: BackboneSection) -> SequenceTokenizer:
    """Tokenizer of a backbone for residues: that of its folder, or the ESM alphabet.

    Raises ConfigError (the source has no tokenizer that can be read) or ResourceError (the hub can't be reached).
    """
    if has_random_weights(section) or _has_esm_ids(read_settings(config_folder(section) / CONFIG_FILE, SOURCE_KEY)):
        return EsmSequenceTokenizer()
    return open_tokenizer(section.source, key=SOURCE_KEY)


def _has_esm_ids(settings: dict[str, Any]) -> bool:
    """Test for the settings of an ESM-2 or an ESM C, whose first 33 ids are those of the alphabet."""
    if settings.get("model_type") == "esm":
        return True
    ids = settings.get("mask_token_id", MASK), settings.get("pad_token_id", PAD)
    return settings.get("model_type") == "esmc" and ids == (MASK, PAD)


def _residue_ids(tokenizer: SequenceTokenizer) -> Tensor | None:
    """(33,) int64: the tokenizer's id of each token of the ESM alphabet; None where they are the same."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    if not tokenizer.one_token_per_residue or (len(tokenizer.prefix), len(tokenizer.suffix)) != (1, 1):
        raise ConfigError(
            f"{SOURCE_KEY}: tasks on residues need a tokenizer that gives one token for each residue, one before and "
            "one after all of them; use model.task classifier, or another backbone"
        )
    unknown = tokenizer.pad if tokenizer.unknown is None else tokenizer.unknown
    ids = torch.full((len(VOCABULARY),), unknown)
    ids[CLS], ids[EOS], ids[PAD] = tokenizer.prefix[0], tokenizer.suffix[0], tokenizer.pad
    ids[MASK] = unknown if tokenizer.mask is None else tokenizer.mask
    for index in range(FIRST_RESIDUE, LAST_RESIDUE + 1):
        own, _ = tokenizer.encode([VOCABULARY[index]])
        ids[index] = int(own[0]) if own.size == 1 else unknown
    return ids
