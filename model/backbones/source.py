"""Where a backbone that is not drawn at random comes from: a local folder or the hub, and safetensors alone.

In: the backbone section of the config. Out: the local folder that holds config.json, and the weights where they are
wanted. A folder or repository that has nothing but pickles is refused, and pickles are not even downloaded. Which
architecture it is, is for others to say (:mod:`model.backbones.esm2_sizes`, :mod:`model.backbones.architectures`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path

from common.errors import ConfigError
from dataset.tokens.model_folder import CONFIG_FILE, fetch, local_folder, read_settings
from train_config.schema import BackboneSection

SOURCE_KEY = "model.backbone.source"

RANDOM_ARCHITECTURES = ("bert", "qwen2", "llama", "t5")
"""What the classifier can draw at random besides the sizes of ESM-2."""

_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
_WEIGHT_PATTERNS = ["model*.safetensors", "model.safetensors.index.json"]
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def config_folder(section: BackboneSection, sizes: Collection[str], endpoint: str | None = None) -> Path:
    """Local folder with the config.json of a model of any architecture; its weights are not fetched.

    Args:
        section: whose source is neither a size nor an architecture with random weights.
        sizes: with random weights, which the message about an unknown source names.
        endpoint: of the hub; the public one if None.

    Raises:
        ConfigError: unknown source.
        ResourceError: the hub can't be reached.
    """
    return _folder(section, sizes, endpoint, [CONFIG_FILE])


def weights_folder(section: BackboneSection, sizes: Collection[str], endpoint: str | None = None) -> Path:
    """Local folder with config.json and, where they exist, safetensors, fetched from the hub if need be.

    Raises:
        ConfigError: unknown source.
        ResourceError: the hub can't be reached.
    """
    return _folder(section, sizes, endpoint, [CONFIG_FILE, *_WEIGHT_PATTERNS])


def check_safetensors(section: BackboneSection, folder: Path) -> None:
    """Refuse a folder without safetensors.

    Raises:
        ConfigError: it holds none.
    """
    if any((folder / name).is_file() for name in _WEIGHT_FILES):
        return
    pickles = sorted(file.name for pattern in _PICKLE_PATTERNS for file in folder.glob(pattern))
    found = f"only {pickles[0]}, a pickle, which can run code when read; " if pickles else ""
    raise ConfigError(
        f"{SOURCE_KEY}: {section.source} holds no safetensors ({found or 'no weights at all; '}"
        "convert the weights with save_pretrained(..., safe_serialization=True) and use that folder)"
    )


def folder_model_type(folder: Path) -> str:
    """Kind of model that config.json describes.

    Raises:
        ConfigError: there is none, or it says nothing.
    """
    model_type = read_settings(folder / CONFIG_FILE, SOURCE_KEY).get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{SOURCE_KEY}: {folder / CONFIG_FILE} names no model_type; give a Hugging Face model folder")
    return model_type


def _folder(section: BackboneSection, sizes: Collection[str], endpoint: str | None, patterns: list[str]) -> Path:
    """The local folder itself, or what the repository on the hub holds of these files; never its pickles or code."""
    source = section.source
    _refuse_overrides(section, sizes)
    folder = local_folder(source, SOURCE_KEY)
    if folder is None and source in RANDOM_ARCHITECTURES:
        raise ConfigError(
            f"{SOURCE_KEY}: {source} with random weights is for model.task classifier; sizes of ESM-2 are "
            f"{', '.join(sizes)}"
        )
    if folder is None and "/" not in source:
        raise ConfigError(f"{SOURCE_KEY}: {source!r} is neither a folder nor a known size; {_nearest(source, sizes)}")
    advice = f"give a local folder, or a size with random weights ({', '.join(sizes)})"
    return folder or fetch(source, patterns, SOURCE_KEY, advice, endpoint)


def _refuse_overrides(section: BackboneSection, sizes: Collection[str]) -> None:
    given = [key for key in ("layers", "hidden_size", "heads") if getattr(section, key) is not None]
    if given and section.source not in RANDOM_ARCHITECTURES:
        raise ConfigError(
            f"model.backbone.{given[0]} can't be set for loaded weights ({section.source}); remove it, or choose a "
            f"size with random weights: {', '.join(sizes)}"
        )


def _nearest(source: str, sizes: Collection[str]) -> str:
    near = difflib.get_close_matches(source, sizes, n=2, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}? (hub names have an owner, as in facebook/esm2_t6_8M_UR50D)"
    return f"sizes are {', '.join(sizes)}; hub names have an owner, as in facebook/esm2_t6_8M_UR50D"
