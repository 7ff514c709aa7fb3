"""Which ESM-2 a setting means: the published sizes, local folders and hub names, told apart and checked.

In: the backbone section of the config. Out: an EsmConfig, and for loaded weights the local folder that holds them.
Weights are safetensors only: a folder or repository that has nothing but pickles is refused, and pickles are not even
downloaded. Sizes and constants are those of Lin et al. 2023 (Science 379:1123, table S1) as published on the hub.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from transformers import EsmConfig

from dataset.tokenizer import EOS, MASK, PAD, VOCABULARY
from train_config.errors import ConfigError, ResourceError
from train_config.schema import BackboneSection


class Esm2Size(NamedTuple):
    """Layers, channels and attention heads."""

    layers: int
    hidden_size: int
    heads: int


SIZES = {
    "esm2_t6_8M": Esm2Size(6, 320, 20),
    "esm2_t12_35M": Esm2Size(12, 480, 20),
    "esm2_t30_150M": Esm2Size(30, 640, 20),
    "esm2_t33_650M": Esm2Size(33, 1280, 20),
    "esm2_t36_3B": Esm2Size(36, 2560, 40),
    "esm2_t48_15B": Esm2Size(48, 5120, 40),
}

_CONFIG_FILE = "config.json"
_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
_WEIGHT_PATTERNS = ["model*.safetensors", "model.safetensors.index.json"]
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def has_random_weights(section: BackboneSection) -> bool:
    """Whether the source is a size name, so that weights are drawn and not loaded."""
    return section.source in SIZES


def read_config(section: BackboneSection, endpoint: str | None = None) -> EsmConfig:
    """The architecture that the section means; from the hub, only config.json is fetched.

    Raises:
        ConfigError: unknown source, impossible size, or a folder that is no ESM-2.
        ResourceError: the hub can't be reached.
    """
    if has_random_weights(section):
        return _config_of_size(section)
    _refuse_overrides(section)
    folder = _local_folder(section.source)
    path = folder / _CONFIG_FILE if folder else _from_hub(section.source, endpoint, weights=False) / _CONFIG_FILE
    return _config_of_file(path)


def weights_folder(section: BackboneSection, endpoint: str | None = None) -> Path:
    """Local folder with config.json and safetensors, fetched from the hub if need be.

    Raises:
        ConfigError: as :func:`read_config`, or there are no safetensors.
        ResourceError: the hub can't be reached.
    """
    _refuse_overrides(section)
    folder = _local_folder(section.source) or _from_hub(section.source, endpoint, weights=True)
    _config_of_file(folder / _CONFIG_FILE)
    if not any((folder / name).is_file() for name in _WEIGHT_FILES):
        pickles = sorted(file.name for pattern in _PICKLE_PATTERNS for file in folder.glob(pattern))
        found = f"only {pickles[0]}, a pickle, which can run code when read; " if pickles else ""
        raise ConfigError(
            f"model.backbone.source: {section.source} holds no safetensors ({found or 'no weights at all; '}"
            "convert the weights with save_pretrained(..., safe_serialization=True) and use that folder)"
        )
    return folder


def _config_of_size(section: BackboneSection) -> EsmConfig:
    size = SIZES[section.source]
    layers, hidden_size, heads = (
        section.layers or size.layers,
        section.hidden_size or size.hidden_size,
        section.heads or size.heads,
    )
    if hidden_size % heads or (hidden_size // heads) % 2:
        fitting = [h for h in range(1, min(hidden_size, 128) + 1) if hidden_size % h == 0 and hidden_size // h % 2 == 0]
        advice = f"one of {fitting}" if fitting else "an even hidden_size"
        raise ConfigError(
            f"model.backbone: hidden_size {hidden_size} can't be split over {heads} heads of an even number of "
            f"channels, which rotary positions need; set model.backbone.heads to {advice}"
        )
    return EsmConfig(
        vocab_size=len(VOCABULARY),
        mask_token_id=MASK,
        pad_token_id=PAD,
        eos_token_id=EOS,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden_size,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=1026,
        layer_norm_eps=1e-5,
        position_embedding_type="rotary",
        emb_layer_norm_before=False,
        token_dropout=True,
    )


def _config_of_file(path: Path) -> EsmConfig:
    """Read and check a config.json, as data: no class named in it is looked up."""
    if not path.is_file():
        raise ConfigError(
            f"model.backbone.source: {path.parent} has no {_CONFIG_FILE}; give a Hugging Face model folder"
        )
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.backbone.source: {path} is not JSON ({error})") from error
    model_type = settings.get("model_type") if isinstance(settings, dict) else None
    if model_type != "esm":
        raise ConfigError(f"model.backbone.source: {path} describes a model of type {model_type!r}, not 'esm'")
    config = EsmConfig.from_dict(settings)
    expected = {
        "vocab_size": len(VOCABULARY),
        "mask_token_id": MASK,
        "pad_token_id": PAD,
        "is_folding_model": False,
        "is_decoder": False,
    }
    for key, value in expected.items():
        if getattr(config, key) != value:
            raise ConfigError(
                f"model.backbone.source: {path} has {key} {getattr(config, key)!r}; an ESM-2 has {value!r}"
            )
    return config


def _refuse_overrides(section: BackboneSection) -> None:
    given = [key for key in ("layers", "hidden_size", "heads") if getattr(section, key) is not None]
    if given and not has_random_weights(section):
        raise ConfigError(
            f"model.backbone.{given[0]} can't be set for loaded weights ({section.source}); remove it, or choose a "
            f"size with random weights: {', '.join(SIZES)}"
        )


def _local_folder(source: str) -> Path | None:
    """The folder that ``source`` names, or None if it can only be a hub name."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"model.backbone.source: {source} is a file; give the folder that holds {_CONFIG_FILE}")
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        raise ConfigError(f"model.backbone.source: there is no folder {source}")
    if "/" not in source:
        raise ConfigError(f"model.backbone.source: {source!r} is neither a folder nor a known size; {_nearest(source)}")
    return None


def _nearest(source: str) -> str:
    near = difflib.get_close_matches(source, SIZES, n=2, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}? (hub names have an owner, as in facebook/esm2_t6_8M_UR50D)"
    return f"sizes are {', '.join(SIZES)}; hub names have an owner, as in facebook/esm2_t6_8M_UR50D"


def _from_hub(name: str, endpoint: str | None, weights: bool) -> Path:
    """Local folder of what the repository holds of config (and weights); never its pickles or code."""
    try:
        patterns = [_CONFIG_FILE, *_WEIGHT_PATTERNS] if weights else [_CONFIG_FILE]
        return Path(snapshot_download(name, allow_patterns=patterns, endpoint=endpoint))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"model.backbone.source: the hub has no (public) model {name}") from error
    except LocalEntryNotFoundError as error:
        raise _unreachable(name) from error
    except EntryNotFoundError as error:
        raise ConfigError(f"model.backbone.source: {name} on the hub has no {_CONFIG_FILE}") from error
    except (OSError, HTTPError) as error:  # refused, timed out, offline mode, proxy
        raise _unreachable(name) from error


def _unreachable(name: str) -> ResourceError:
    return ResourceError(
        f"model.backbone.source: {name} is not in the local cache and the hub can't be reached; give a local folder, "
        f"or a size with random weights ({', '.join(SIZES)})"
    )
