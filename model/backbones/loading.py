"""Backbones from the config: weights that are random by the seed, or loaded from a local folder or the hub.

In: the backbone section of the config. Out: a packed backbone, with the head of its masked language model where that is
wanted. Only safetensors are read, and no code that a folder names is run. For tasks on residues, batches come in the
ESM alphabet: ESM-2, ESM C and random weights have its ids, any other backbone (ProtBERT ...) a table of its own.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import EsmForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.text import first_line
from esmeray.common.verification import verified
from esmeray.dataset.tokens.base import EsmSequenceTokenizer, HuggingFaceTokenizer, SequenceTokenizer, open_tokenizer
from esmeray.dataset.tokens.esm import CLS, EOS, FIRST_RESIDUE, LAST_RESIDUE, MASK, PAD, VOCABULARY
from esmeray.dataset.tokens.model_folder import CONFIG_FILE, read_settings
from esmeray.model.backbones.architectures import MASKED_LM_HEADS, masked_lm_class, model_class, read_config
from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.backbones.esm2 import EsmBackbone
from esmeray.model.backbones.huggingface import HuggingFaceBackbone, PaddedBackbone
from esmeray.model.backbones.source import SOURCE_KEY, config_folder, has_random_weights, is_padded, weights_folder
from esmeray.model.backbones.streaming import REMEDY, StreamedLayers, stored_state
from esmeray.model.section import BackboneSection

_MAY_BE_MISSING = {"contact_head", "pooler", *(name for names in MASKED_LM_HEADS.values() for name in names)}
"""Heads whose weights a folder may lack; these are random by the seed."""


def build_backbone(
    section: BackboneSection,
    seed: int,
    vocabulary_size: int | None = None,
    pad: int = 0,
    *,
    empty: bool = False,
    stream: bool = False,
) -> PackedBackbone:
    """The backbone that the section means, in fp32 on the CPU, in training mode unless it is frozen.

    Random weights depend on ``seed`` alone; the global random state is left as it was. ``vocabulary_size``: of the
    tokenizer; that of the ESM alphabet if None. ``empty``: on the meta device, without weights: to count them before
    any is read. ``stream``: the layers of a frozen ESM-2 in a folder are read as they are needed. Raises ConfigError
    (unknown source, impossible size, no safetensors, an architecture that is not known packed, or a vocabulary larger
    than the embedding), DataError (safetensors that are damaged, incomplete or of another shape) or ResourceError (the
    hub can't be reached).
    """
    config = read_config(section, len(VOCABULARY) if vocabulary_size is None else vocabulary_size, pad)
    is_esm = config.model_type == "esm"  # with its head, so that the same seed draws the same for every task
    network = _network(section, config, EsmForMaskedLM if is_esm else model_class(config), seed, empty, stream)
    backbone = _wrap(network.esm if is_esm else network, section, pad)
    # An id beyond the table would be an error in the middle of a batch, on CUDA one that ends the process.
    rows = backbone.model.get_input_embeddings().weight.shape[0]
    if vocabulary_size is not None and vocabulary_size > rows:
        raise ConfigError(
            f"the tokenizer has {vocabulary_size} tokens, but the embedding of {section.source} {rows}; set "
            "model.tokenizer.source to the backbone's own (auto)"
        )
    return backbone


def build_masked_lm(
    section: BackboneSection, seed: int, vocabulary_size: int, pad: int, *, empty: bool = False, stream: bool = False
) -> tuple[PackedBackbone, nn.Module]:
    """The backbone of :func:`build_backbone`, and the head that makes (..., K) logits of its (..., D) features.

    ``is_drawn`` of the head: the folder has weights, but none of it, so that it is random. Raises as
    :func:`build_backbone`; ConfigError also where the head is not known.
    """
    config = read_config(section, vocabulary_size, pad)
    network = _network(section, config, masked_lm_class(config), seed, empty, stream)
    names = MASKED_LM_HEADS[config.model_type]
    heads = [getattr(network, name) for name in names]
    head: Any = heads[0] if len(heads) == 1 else nn.Sequential(*heads)
    head.is_drawn = any(key.split(".")[0] in names for key in getattr(network, "drawn_weights", ()))
    return _wrap(network.base_model, section, pad), head


def masked_lm_network(backbone: PackedBackbone, head: nn.Module) -> PreTrainedModel:
    """The Hugging Face model that holds the same parameters, to be saved; nothing is copied."""
    config = backbone.config
    names = MASKED_LM_HEADS[config.model_type]
    with torch.device("meta"):  # its own weights are thrown away at once: none are made
        network: PreTrainedModel = masked_lm_class(config)(config)
    setattr(network, network.base_model_prefix, backbone.model)
    for name, module in zip(names, [head] if len(names) == 1 else head.children(), strict=True):
        setattr(network, name, module)
    return network


def residue_backbone(section: BackboneSection, seed: int, *, empty: bool = False) -> PackedBackbone:
    """The backbone of :func:`build_backbone` for batches in the ESM alphabet.

    Raises as there; ConfigError also where its tokenizer does not give one token for each residue between two others.
    """
    tokenizer = residue_tokenizer(section)
    backbone = build_backbone(section, seed, tokenizer.vocabulary_size, tokenizer.pad, empty=empty)
    backbone.residue_ids = _residue_ids(tokenizer)
    return backbone


def residue_masked_lm(section: BackboneSection, seed: int, *, empty: bool = False) -> tuple[PackedBackbone, nn.Module]:
    """The same with the head of :func:`build_masked_lm`, which raises besides."""
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


def load_network(section: BackboneSection, seed: int) -> EsmForMaskedLM:
    """Hugging Face's ESM-2 with its language-model head, in fp32 on the CPU; raises as :func:`build_backbone`."""
    network: EsmForMaskedLM = _network(section, read_config(section, 0, 0), EsmForMaskedLM, seed, empty=False)
    return network


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw CPU random numbers from ``seed`` within the block, and restore the global state after it."""
    # CPU alone, where weights are drawn: to fork the state of a GPU would start CUDA in processes that do without.
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        yield


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' loading report and progress bars: what matters of it is checked and raised here."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _has_esm_ids(settings: dict[str, Any]) -> bool:
    """Test for the settings of an ESM-2 or an ESM C, whose first 33 ids are those of the alphabet."""
    kind = settings.get("model_type")
    ids = (settings.get("mask_token_id", MASK), settings.get("pad_token_id", PAD))
    return kind == "esm" or (kind == "esmc" and ids == (MASK, PAD))  # ESM-2's are checked with its other settings


def _residue_ids(tokenizer: SequenceTokenizer) -> Tensor | None:
    """(33,) int64: the tokenizer's id of each token of the ESM alphabet; None where they are the same."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    if not tokenizer.one_token_per_residue or (len(tokenizer.prefix), len(tokenizer.suffix)) != (1, 1):
        raise ConfigError(
            f"{SOURCE_KEY}: tasks on residues need a tokenizer that gives one token for each residue, one before and "
            "one after all of them; use model.task classifier, or another backbone"
        )
    # A letter that the other vocabulary lacks becomes its unknown token, as its own tokenizer would have it.
    unknown = tokenizer.pad if tokenizer.unknown is None else tokenizer.unknown
    ids = torch.full((len(VOCABULARY),), unknown)
    ids[CLS], ids[EOS], ids[PAD] = tokenizer.prefix[0], tokenizer.suffix[0], tokenizer.pad
    ids[MASK] = unknown if tokenizer.mask is None else tokenizer.mask
    for index in range(FIRST_RESIDUE, LAST_RESIDUE + 1):
        own, _ = tokenizer.encode([VOCABULARY[index]])
        ids[index] = int(own[0]) if own.size == 1 else unknown
    return ids


def _network(
    section: BackboneSection, config: PreTrainedConfig, kind: type[Any], seed: int, empty: bool, stream: bool = False
) -> Any:
    # Seeded also where weights are read: a head that the folder lacks is drawn.
    with seeded(seed), quiet_transformers(), torch.device("meta") if empty else nullcontext():
        if empty or has_random_weights(section):
            return kind(config)
        load = _streamed_network if stream else _load_weights
        return load(kind, weights_folder(section), config)


def _wrap(model: PreTrainedModel, section: BackboneSection, pad: int) -> PackedBackbone:
    settings: dict[str, Any] = {"frozen": section.frozen, "gradient_checkpointing": section.gradient_checkpointing}
    kind: Any = EsmBackbone if model.config.model_type == "esm" else HuggingFaceBackbone
    if is_padded(section, model.config.model_type):
        kind = partial(PaddedBackbone, pad=pad)
    return kind(model, **settings).train()  # type: ignore[no-any-return]  # from_pretrained leaves it in evaluation mode


def _streamed_network(kind: type[Any], folder: Path, config: PreTrainedConfig) -> Any:
    """The ESM-2 of :func:`_load_weights`, whose layers are read as they are needed."""
    without_layers = copy.copy(config)
    without_layers.num_hidden_layers = 0
    network = _load_weights(kind, folder, without_layers, reshaped="contact_head")  # which has a weight for each layer
    with torch.device("meta"):
        whole = kind(config).esm
    head = stored_state(whole.contact_head, "contact_head", folder)
    whole.contact_head.load_state_dict({name: stored.read().float() for name, stored in head.items()}, assign=True)
    network.esm.contact_head = whole.contact_head
    layers = whole.encoder.layer
    network.esm.encoder.layer = StreamedLayers(layers, stored_state(layers, "encoder.layer", folder))
    network.config = network.esm.config = config
    return network


def _load_weights(kind: type[Any], folder: Path, config: PreTrainedConfig, reshaped: str = "") -> Any:
    """A Hugging Face model with the safetensors of a local folder, in fp32 on the CPU; heads may be missing.

    ``reshaped``: a module that is replaced, whose shape need not be that of the folder.
    """
    for path in sorted(folder.glob("model*.safetensors*")):
        verified(path)
    try:
        network, info = kind.from_pretrained(
            folder,
            config=config,
            output_loading_info=True,
            use_safetensors=True,
            weights_only=True,
            local_files_only=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # reported in one line below, where transformers prints a table and raises
        )
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        reason = first_line(error)
        raise DataError(f"the weights in {folder} can't be read ({reason}); {REMEDY}") from error
    # transformers draws what is missing at random and only warns: features of such a model are noise.
    missing = [f"lack {key}" for key in sorted(info["missing_keys"]) if not _MAY_BE_MISSING & set(key.split("."))]
    mismatched = [key for key in sorted(map(str, info["mismatched_keys"])) if not (reshaped and reshaped in key)]
    other = [f"have another shape than config.json says at {key}" for key in mismatched]
    if problems := missing + other:
        raise DataError(f"the weights in {folder} {problems[0]}; {REMEDY}")
    network.drawn_weights = frozenset(info["missing_keys"])
    return network
