"""Which ESM-2 a setting means: the published sizes, or the config of a local folder or hub name, checked.

In: the backbone section of the config. Out: an EsmConfig or its settings, and for loaded weights the local
folder that holds them (:mod:`model.backbones.source`). Sizes and constants are those of Lin et al. 2023 (Science
379:1123, table S1) as published on the hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import ConfigError
from dataset.tokens.esm import EOS, MASK, PAD, VOCABULARY
from dataset.tokens.model_folder import CONFIG_FILE, read_settings
from model.backbones import source as backbone_source
from model.backbones.source import SOURCE_KEY
from train_config.schema import BackboneSection

if TYPE_CHECKING:
    from transformers import EsmConfig


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

_DEFAULTS = {
    "vocab_size": None,
    "mask_token_id": None,
    "pad_token_id": None,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 1026,
    "position_embedding_type": "absolute",
    "emb_layer_norm_before": None,
    "is_folding_model": False,
    "is_decoder": False,
    "tie_word_embeddings": True,
}
"""Defaults of transformers' EsmConfig."""


def has_random_weights(section: BackboneSection) -> bool:
    """Whether the source is a size name, so that weights are drawn and not loaded."""
    return section.source in SIZES


def read_config(section: BackboneSection, endpoint: str | None = None) -> EsmConfig:
    """The architecture that the section means; from the hub, only config.json is fetched.

    Raises:
        ConfigError: unknown source, impossible size, or a folder that is no ESM-2.
        ResourceError: the hub can't be reached.
    """
    from transformers import EsmConfig  # here: it takes a second, which a plan or a refusal does not wait for

    return EsmConfig.from_dict(read_esm_settings(section, endpoint))


def read_esm_settings(section: BackboneSection, endpoint: str | None = None) -> dict[str, Any]:
    """Settings of the EsmConfig of :func:`read_config`, which raises the same; those of :data:`_DEFAULTS` at least."""
    if has_random_weights(section):
        return _DEFAULTS | _settings_of_size(section)
    return _settings_of_file(backbone_source.config_folder(section, SIZES, endpoint) / CONFIG_FILE)


def weights_folder(section: BackboneSection, endpoint: str | None = None) -> Path:
    """Local folder with config.json and safetensors, fetched from the hub if need be.

    Raises:
        ConfigError: as :func:`read_config`, or there are no safetensors.
        ResourceError: the hub can't be reached.
    """
    folder = backbone_source.weights_folder(section, SIZES, endpoint)
    _settings_of_file(folder / CONFIG_FILE)
    backbone_source.check_safetensors(section, folder)
    return folder


def check_heads(hidden_size: int, heads: int, *, rotary: bool = True) -> None:
    """Refuse channels that can't be split over the heads; rotary positions need an even number for each.

    Raises:
        ConfigError: with the numbers of heads that fit.
    """
    multiple = 2 if rotary else 1
    if hidden_size % (heads * multiple) == 0:
        return
    fitting = [h for h in range(1, min(hidden_size, 128) + 1) if hidden_size % (h * multiple) == 0]
    advice = f"one of {fitting}" if fitting else "an even hidden_size"
    needed = " of an even number of channels, which rotary positions need" if rotary else ""
    raise ConfigError(
        f"model.backbone: hidden_size {hidden_size} can't be split over {heads} heads{needed}; "
        f"set model.backbone.heads to {advice}"
    )


def _settings_of_size(section: BackboneSection) -> dict[str, Any]:
    size = SIZES[section.source]
    layers, hidden_size, heads = (
        section.layers or size.layers,
        section.hidden_size or size.hidden_size,
        section.heads or size.heads,
    )
    check_heads(hidden_size, heads)
    return {
        "vocab_size": len(VOCABULARY),
        "mask_token_id": MASK,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden_size,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 1026,
        "layer_norm_eps": 1e-5,
        "position_embedding_type": "rotary",
        "emb_layer_norm_before": False,
        "token_dropout": True,
    }


def _settings_of_file(path: Path) -> dict[str, Any]:
    """Read and check a config.json, as data: no class named in it is looked up."""
    settings = _DEFAULTS | read_settings(path, SOURCE_KEY)
    model_type = settings.get("model_type")
    if model_type != "esm":
        raise ConfigError(
            f"{SOURCE_KEY}: {path} describes a model of type {model_type!r}, not 'esm'; other architectures are for "
            "model.task classifier"
        )
    expected = {
        "vocab_size": len(VOCABULARY),
        "mask_token_id": MASK,
        "pad_token_id": PAD,
        "is_folding_model": False,
        "is_decoder": False,
    }
    for key, value in expected.items():
        if settings[key] != value:
            raise ConfigError(f"{SOURCE_KEY}: {path} has {key} {settings[key]!r}; an ESM-2 has {value!r}")
    return settings
