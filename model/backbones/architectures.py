"""Which architectures other than ESM-2 the classifier takes, and which of them know packed sequences.

In: the backbone section of the config. Out: a Hugging Face config and the class of the model. A config.json is read as
data: its ``model_type`` is looked up among transformers' own classes, and no code that it names is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import BertConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, T5Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING

from common.errors import ConfigError
from dataset.tokens.model_folder import CONFIG_FILE, read_settings
from model.backbones.esm2_sizes import SIZES
from model.backbones.facts import BERT_POSITIONS, T5_BUCKETS, random_size
from model.backbones.source import RANDOM_ARCHITECTURES, SOURCE_KEY, folder_model_type
from train_config.schema import BackboneSection

PACKED = {
    "bert": False,
    "camembert": False,
    "electra": False,
    "esmc": False,
    "gpt2": True,
    "llama": True,
    "mistral": True,
    "qwen2": True,
    "qwen3": True,
    "roberta": False,
    "xlm-roberta": False,
}
"""``model_type`` of the architectures whose attention is transformers' AttentionInterface and whose positions are given
for each token, and whether they are causal. Each is held to one sequence at a time by a test."""

ALWAYS_PADDED = ("t5", "mt5", "umt5")
"""Their relative positions are a bias of the scores, which packed attention has no room for."""


def has_random_architecture(section: BackboneSection) -> bool:
    """Whether the source is an architecture whose weights are drawn at the size that the section gives."""
    return section.source in RANDOM_ARCHITECTURES


def all_sizes() -> list[str]:
    """Every source whose weights are drawn."""
    return [*SIZES, *RANDOM_ARCHITECTURES]


def random_config(section: BackboneSection, vocabulary_size: int, pad: int) -> PreTrainedConfig:
    """An architecture of the size that :func:`model.backbones.facts.random_size` gives.

    Args:
        section: its source is one of :data:`RANDOM_ARCHITECTURES`.
        vocabulary_size: rows of the embedding.
        pad: id whose embedding is 0 and not learnt.

    Raises:
        ConfigError: the channels can't be split over the heads.
    """
    layers, hidden_size, heads, inner = random_size(section)
    if section.source == "bert":
        return BertConfig(
            vocab_size=vocabulary_size,
            pad_token_id=pad,
            hidden_size=hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=inner,
            max_position_embeddings=BERT_POSITIONS,
            attention_probs_dropout_prob=0.0,  # dropped scores would rule out the kernels of packed attention
        )
    if section.source == "t5":
        return T5Config(
            vocab_size=vocabulary_size,
            pad_token_id=pad,
            d_model=hidden_size,
            num_layers=layers,
            num_heads=heads,
            d_kv=hidden_size // heads,
            d_ff=inner,
            relative_attention_num_buckets=T5_BUCKETS,
            feed_forward_proj="gated-gelu",
        )
    kind: Any = {"qwen2": Qwen2Config, "llama": LlamaConfig}[section.source]
    return kind(
        vocab_size=vocabulary_size,
        pad_token_id=pad,
        bos_token_id=None,
        eos_token_id=None,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=inner,
    )


def folder_config(folder: Path) -> PreTrainedConfig:
    """The config of a local folder.

    Raises:
        ConfigError: transformers has no such architecture, or the folder is no plain model of one.
    """
    path = folder / CONFIG_FILE
    model_type = folder_model_type(folder)
    settings = read_settings(path, SOURCE_KEY)
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"{SOURCE_KEY}: {path} describes a model of type {model_type!r}, which transformers does not have; code "
            "of its own is never run"
        )
    if "quantization_config" in settings:
        raise ConfigError(f"{SOURCE_KEY}: the weights in {folder} are quantized; use a model with fp32, bf16 or fp16")
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{SOURCE_KEY}: {folder} holds an adapter; merge it into its model, and use that folder")
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(settings)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{SOURCE_KEY}: {path} is no config of a {model_type} ({' '.join(str(error).split())})"
        ) from error
    return config


def model_class(config: PreTrainedConfig) -> type[Any]:
    """Class of the model that gives features; of an encoder with a decoder, the encoder alone.

    Raises:
        ConfigError: transformers has none.
    """
    kind: Any
    if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:  # T5's encoder, also where it was saved alone
        kind = MODEL_FOR_TEXT_ENCODING_MAPPING[type(config)]
    elif type(config) in MODEL_MAPPING and not config.is_encoder_decoder:
        kind = MODEL_MAPPING[type(config)]
    else:
        raise ConfigError(
            f"{SOURCE_KEY}: of a model of type {config.model_type!r} transformers has no encoder by itself; choose "
            "another"
        )
    return kind[0] if isinstance(kind, tuple) else kind


def check_packed(config: PreTrainedConfig) -> None:
    """Refuse an architecture that packed attention does not know.

    Raises:
        ConfigError: it says what to do instead.
    """
    if config.model_type not in PACKED:
        raise ConfigError(
            f"{SOURCE_KEY}: packed attention does not know models of type {config.model_type!r} (it knows esm, "
            f"{', '.join(PACKED)}); set model.backbone.padded true"
        )
    if getattr(config, "is_decoder", False) and not PACKED[config.model_type]:
        raise ConfigError(
            f"{SOURCE_KEY}: this {config.model_type} is a decoder (is_decoder in its config.json), which packed "
            "attention does not know; set model.backbone.padded true"
        )
