"""Backbones from the config: weights that are random by the seed, or loaded from a local folder or the hub.

In: the backbone section of the config. Out: a packed backbone, with the head of its masked language model where that is
wanted. Only safetensors are read, and no code that a folder names is run. For tasks on residues, batches come in the
ESM alphabet: ESM-2, ESM C and random weights have its ids, any other backbone (ProtBERT ...) a table of its own.
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
    """The backbone that the section means, in fp32 on the CPU, in training mode unless it is frozen.

    Random weights depend on ``seed`` alone; the global random state is left as it was. ``vocabulary_size``: of the
    tokenizer; that of the ESM alphabet if None. ``empty``: on the meta device, without weights: to count them before
    any is read. ``stream``: the layers of a frozen ESM-2 in a folder are read as they are needed; ``weights``: of these
    layers, as they are stored or of 8 bits. Raises ConfigError (unknown source, impossible size, no safetensors, an
    architecture that is not known packed, or a vocabulary larger than the embedding), DataError (safetensors that are
    damaged, incomplete or of another shape) or ResourceError (the hub can't be reached).
    """
    if is_esm2(section):  # with its head, so that the same seed draws the same for every task
        network: nn.Module = _esm2(section, seed, empty, stream, weights).esm
    else:
        rows = len(VOCABULARY) if vocabulary_size is None else vocabulary_size
        # Also where weights are read: a head that the folder lacks is drawn.
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
    """The backbone of :func:`build_backbone`, and the head that makes (..., K) logits of its (..., D) features.

    ``is_drawn`` of the head: the folder has weights, but none of it, so that it is random. Raises as
    :func:`build_backbone`; ConfigError also where the head is not known.
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
    """The backbone of :func:`build_backbone` for batches in the ESM alphabet.

    Raises as there; ConfigError also where its tokenizer does not give one token for each residue between two others.
    """
    tokenizer = residue_tokenizer(section)
    backbone = build_backbone(section, seed, tokenizer.vocabulary_size, tokenizer.pad, empty=empty)
    return _in_alphabet(backbone, tokenizer)


def residue_masked_lm(section: BackboneSection, seed: int, *, empty: bool = False) -> tuple[PackedBackbone, nn.Module]:
    """The same with the head of :func:`build_masked_lm`, which raises besides."""
    tokenizer = residue_tokenizer(section)
    backbone, head = build_masked_lm(section, seed, tokenizer.vocabulary_size, tokenizer.pad, empty=empty)
    return _in_alphabet(backbone, tokenizer), head


def residue_tokenizer(section: BackboneSection) -> SequenceTokenizer:
    """Tokenizer of a backbone for residues: that of its folder, or the ESM alphabet.

    Raises ConfigError (the source has no tokenizer that can be read) or ResourceError (the hub can't be reached).
    """
    if has_random_weights(section) or _has_esm_ids(read_settings(config_folder(section) / CONFIG_FILE, SOURCE_KEY)):
        return EsmSequenceTokenizer()
    tokenizer = open_tokenizer(section.source, key=SOURCE_KEY)
    check_protein(tokenizer, section.source, SOURCE_KEY)
    return tokenizer


def load_network(section: BackboneSection, seed: int) -> Any:
    """transformers' EsmForMaskedLM of an ESM-2, in fp32 on the CPU; raises as :func:`build_backbone`."""
    return _huggingface().transformers_network(_esm2(section, seed, empty=False))


@contextmanager
def drawn(seed: int, *, empty: bool = False) -> Iterator[None]:
    """Draw a module's weights on the CPU from ``seed`` within the block, and restore the global random state after it.

    ``empty``: leave the weights out, to count them.
    """
    # CPU alone, where weights are drawn: to fork the state of a GPU would start CUDA in processes that do without.
    with torch.random.fork_rng(devices=[]), empty_weights() if empty else nullcontext():
        torch.random.default_generator.manual_seed(seed)
        yield


def _has_esm_ids(settings: dict[str, Any]) -> bool:
    """Test for the settings of an ESM-2 or an ESM C, whose first 33 ids are those of the alphabet."""
    kind = settings.get("model_type")
    ids = (settings.get("mask_token_id", MASK), settings.get("pad_token_id", PAD))
    return kind == "esm" or (kind == "esmc" and ids == (MASK, PAD))  # ESM-2's are checked with its other settings


def _in_alphabet(backbone: PackedBackbone, tokenizer: SequenceTokenizer) -> PackedBackbone:
    """The backbone with the tokenizer's ids of the ESM alphabet, if these are others, and the letters that it lacks."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return backbone
    if not tokenizer.one_token_per_residue or (len(tokenizer.prefix), len(tokenizer.suffix)) != (1, 1):
        raise ConfigError(
            f"{SOURCE_KEY}: tasks on residues need a tokenizer that gives one token for each residue, one before and "
            "one after all of them; use model.task classifier, or another backbone"
        )
    # A letter that the other vocabulary lacks becomes its unknown token; without one, plans refuse such letters.
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
    # Here, since importing transformers' models takes seconds, which those of ESM-2 do without.
    from esmeray.model.backbones import huggingface_loading

    return huggingface_loading


def _wrap(network: Any, section: BackboneSection, pad: int, vocabulary_size: int | None) -> PackedBackbone:
    # An id beyond the table would be an error in the middle of a batch, on CUDA one that ends the process.
    rows = network.get_input_embeddings().weight.shape[0]
    if vocabulary_size is not None and vocabulary_size > rows:
        raise ConfigError(
            f"the tokenizer has {vocabulary_size} tokens, but the embedding of {section.source} {rows}; "
            "give the tokenizer that the model was trained with (model.tokenizer.source auto takes the folder's)"
        )
    settings: dict[str, Any] = {"frozen": section.frozen, "gradient_checkpointing": section.gradient_checkpointing}
    # In training mode, but for a frozen one, which stays as it is.
    if isinstance(network, EsmModel) and not section.padded:
        return EsmBackbone(network, **settings).train()
    return _huggingface().wrapped(network, section, pad, settings).train()
