"""Backbones from the config: randomly initialised, or loaded from a local folder or the hub.

In: the backbone section of the config. Out: a packed backbone, optionally with its masked-LM head. Only safetensors are
read, and code in a folder is never run. For tasks on residues, batches come in the ESM alphabet: ESM-2, ESM C and
random weights use its ids; other backbones (ProtBERT ...) have a lookup table.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from esmeray.common.errors import ConfigError
from esmeray.dataset.tokens.base import (
    EsmSequenceTokenizer,
    HuggingFaceTokenizer,
    SequenceTokenizer,
    check_protein,
    open_tokenizer,
)
from esmeray.dataset.tokens.esm import CLS, EOS, FIRST_RESIDUE, LAST_RESIDUE, MASK, PAD, VOCABULARY
from esmeray.dataset.tokens.model_folder import CONFIG_FILE, read_settings
from esmeray.model.backbones.base import PackedBackbone, empty_weights
from esmeray.model.backbones.esm2 import EsmBackbone
from esmeray.model.backbones.esm2_network import EsmForMaskedLM, EsmModel, esm2_config
from esmeray.model.backbones.source import (
    SOURCE_KEY,
    config_folder,
    has_random_weights,
    has_safetensors,
    is_esm2,
    weights_folder,
)
from esmeray.model.section import BackboneSection
from esmeray.train_config.section import Weights


def build_backbone(
    section: BackboneSection,
    seed: int,
    vocabulary_size: int | None = None,
    pad: int = 0,
    *,
    empty: bool = False,
    stream: bool = False,
    weights: Weights = "stored",
) -> PackedBackbone:
    """Return the backbone that the section describes, in fp32 on the CPU, in training mode unless frozen.

    Random weights depend on ``seed`` only; the global random state is unchanged. ``vocabulary_size``: of the tokenizer;
    default: the ESM alphabet's. ``empty``: on the meta device, without weights, to count parameters before loading.
    ``stream``: read the layers of a frozen ESM-2 folder when they are needed; ``weights``: format of these layers, as
    stored or int8.

    Raises ConfigError (unknown source, impossible size, no safetensors, an architecture without packed attention, or a
    vocabulary larger than the embedding), DataError (safetensors that are damaged, incomplete or of another shape) or
    ResourceError (the hub can't be reached).
    """
    if is_esm2(section):  # with its head, so that a seed gives the same weights in every task
        network: nn.Module = _esm2(section, seed, empty, stream, weights).esm
    else:
        rows = len(VOCABULARY) if vocabulary_size is None else vocabulary_size
        # Also if weights are loaded: missing heads are random.
        with drawn(seed, empty=empty):
            network = _huggingface().features_network(section, rows, pad, empty)
    return _wrap(network, section, pad, vocabulary_size)


def build_masked_lm(
    section: BackboneSection,
    seed: int,
    vocabulary_size: int,
    pad: int,
    *,
    empty: bool = False,
    stream: bool = False,
    weights: Weights = "stored",
) -> tuple[PackedBackbone, nn.Module]:
    """Return the backbone of :func:`build_backbone`, and the head from (..., D) features to (..., K) logits.

    The head's ``is_drawn`` is true if the folder has weights but none for the head, so that it is random. Raises as
    :func:`build_backbone`; ConfigError also if the head is unknown.
    """
    if is_esm2(section):
        network = _esm2(section, seed, empty, stream, weights)
        model: nn.Module = network.esm
        head: Any = network.lm_head
        is_drawn = any(name.startswith("lm_head.") for name in network.drawn_weights)
    else:
        with drawn(seed, empty=empty):
            model, head, is_drawn = _huggingface().masked_lm(section, vocabulary_size, pad, empty)
    head.is_drawn = is_drawn
    return _wrap(model, section, pad, vocabulary_size), head


def residue_backbone(section: BackboneSection, seed: int, *, empty: bool = False) -> PackedBackbone:
    """Return the backbone of :func:`build_backbone` for batches in the ESM alphabet.

    Raises as there; ConfigError also unless its tokenizer maps each residue to one token, between two special ones.
    """
    tokenizer = residue_tokenizer(section)
    backbone = build_backbone(section, seed, tokenizer.vocabulary_size, tokenizer.pad, empty=empty)
    return _in_alphabet(backbone, tokenizer).use_final_norm()


def residue_masked_lm(section: BackboneSection, seed: int, *, empty: bool = False) -> tuple[PackedBackbone, nn.Module]:
    """Return the same with the head of :func:`build_masked_lm`; raises as both."""
    tokenizer = residue_tokenizer(section)
    backbone, head = build_masked_lm(section, seed, tokenizer.vocabulary_size, tokenizer.pad, empty=empty)
    return _in_alphabet(backbone, tokenizer).use_final_norm(), head


def residue_tokenizer(section: BackboneSection) -> SequenceTokenizer:
    """Return the tokenizer of a backbone for residues: its folder's, or the ESM alphabet.

    Raises ConfigError (the source has no readable tokenizer) or ResourceError (the hub can't be reached).
    """
    if has_random_weights(section) or _has_esm_ids(read_settings(config_folder(section) / CONFIG_FILE, SOURCE_KEY)):
        return EsmSequenceTokenizer()
    tokenizer = open_tokenizer(section.source)
    check_protein(tokenizer, section.source)
    return tokenizer


def load_network(section: BackboneSection, seed: int) -> Any:
    """Return transformers' EsmForMaskedLM of an ESM-2, in fp32 on the CPU; raises as :func:`build_backbone`."""
    return _huggingface().transformers_network(_esm2(section, seed, empty=False))


@contextmanager
def drawn(seed: int, *, empty: bool = False) -> Iterator[None]:
    """Initialise weights on the CPU from ``seed`` within the block, and restore the global random state after it.

    ``empty``: create no weights, to count parameters.
    """
    # CPU only, where weights are initialised: forking a GPU's state would start CUDA in processes that don't use it.
    with torch.random.fork_rng(devices=[]), empty_weights() if empty else nullcontext():
        torch.random.default_generator.manual_seed(seed)
        yield


def _has_esm_ids(settings: dict[str, Any]) -> bool:
    """Test for an ESM-2 or ESM C, whose first 33 ids are the alphabet's."""
    kind = settings.get("model_type")
    ids = (settings.get("mask_token_id", MASK), settings.get("pad_token_id", PAD))
    return kind == "esm" or (kind == "esmc" and ids == (MASK, PAD))  # ESM-2's ids are checked with its other settings


def _in_alphabet(backbone: PackedBackbone, tokenizer: SequenceTokenizer) -> PackedBackbone:
    """Set the tokenizer's ids of the ESM alphabet, if they differ, and the letters that it lacks."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return backbone
    if not tokenizer.one_token_per_residue or (len(tokenizer.prefix), len(tokenizer.suffix)) != (1, 1):
        raise ConfigError(
            f"{SOURCE_KEY}: residue tasks need a tokenizer with one token per residue, plus one before and one "
            "after the sequence; use model.task classifier, or another backbone"
        )
    # Letters that the vocabulary lacks map to its unknown token; without one, plans refuse such letters.
    unknown = tokenizer.pad if tokenizer.unknown is None else tokenizer.unknown
    ids = torch.full((len(VOCABULARY),), unknown)
    ids[CLS], ids[EOS], ids[PAD] = tokenizer.prefix[0], tokenizer.suffix[0], tokenizer.pad
    ids[MASK] = unknown if tokenizer.mask is None else tokenizer.mask
    for index in range(FIRST_RESIDUE, LAST_RESIDUE + 1):
        letter = VOCABULARY[index]
        if letter in tokenizer.known:
            ids[index] = int(tokenizer.encode([letter])[0][0])
    backbone.residue_ids = ids
    backbone.unknown_letters = tokenizer.unknown_letters
    return backbone


def _esm2(
    section: BackboneSection, seed: int, empty: bool, stream: bool = False, weights: Weights = "stored"
) -> EsmForMaskedLM:
    config = esm2_config(section)
    with drawn(seed, empty=empty):
        if empty or has_random_weights(section):
            return EsmForMaskedLM(config)
        folder = weights_folder(section)
        if has_safetensors(folder):
            return EsmForMaskedLM.from_folder(config, folder, stream=stream, weights=weights)
        stored = _huggingface().load_esm(folder, config)
        network = EsmForMaskedLM(config)
        network.load_state_dict(stored.state_dict())
        network.drawn_weights = stored.drawn_weights
        return network


def _huggingface() -> Any:
    # Imported here: importing transformers' models takes seconds, and ESM-2 does not need them.
    from esmeray.model.backbones import huggingface_loading

    return huggingface_loading


def _wrap(network: Any, section: BackboneSection, pad: int, vocabulary_size: int | None) -> PackedBackbone:
    # Checked here: an id beyond the table fails in the middle of a batch, and on CUDA ends the process.
    rows = network.get_input_embeddings().weight.shape[0]
    if vocabulary_size is not None and vocabulary_size > rows:
        raise ConfigError(
            f"the tokenizer has {vocabulary_size} tokens, but the embedding table of {section.source} has "
            f"{rows}; give a folder with the tokenizer that the model was trained with"
        )
    settings: dict[str, Any] = {"frozen": section.frozen, "gradient_checkpointing": section.gradient_checkpointing}
    # In training mode, unless frozen.
    if isinstance(network, EsmModel) and not section.padded:
        return EsmBackbone(network, **settings).train()
    return _huggingface().wrapped(network, section, pad, settings).train()
