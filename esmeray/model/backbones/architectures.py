"""Architectures of transformers: the one a source names, support for packed sequences, and masked-LM heads.

A config.json is read as data: its ``model_type`` selects one of transformers' own classes; code that it names is never
run.
"""

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    BertConfig,
    EsmcConfig,
    LlamaConfig,
    ModernBertConfig,
    PreTrainedConfig,
    Qwen2Config,
    T5Config,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    MODEL_MAPPING,
)

from esmeray.common.errors import ConfigError
from esmeray.dataset.tokens.model_folder import CONFIG_FILE, read_settings
from esmeray.model.backbones.source import (
    ALWAYS_PADDED,
    MASKED_LM_HEADS,
    PACKED,
    SOURCE_KEY,
    config_folder,
    has_random_weights,
    is_padded,
    model_type,
    random_size,
)
from esmeray.model.section import BackboneSection

_GATED_SHARE = 8 / 3
"""Inner channels per channel of a gated feed-forward layer: three matrices then have as many parameters as two with a
factor of 4 (Shazeer 2020, section 3)."""


def read_config(section: BackboneSection, vocabulary_size: int, pad: int) -> PreTrainedConfig:
    """Return the config that the section describes; from the hub, only config.json is fetched.

    With random weights, ``vocabulary_size`` is the number of rows of the embedding, and ``pad`` the id whose embedding
    is 0 and not learnt. Supports any architecture except ESM-2, which is supported if padded. Raises ConfigError
    (unknown source, impossible size, or an architecture without packed attention) or ResourceError (the hub can't be
    reached).
    """
    config = _random_config(section, vocabulary_size, pad) if has_random_weights(section) else _folder_config(section)
    if not is_padded(section, config.model_type):
        _check_packed(config)
    return config


def model_class(config: PreTrainedConfig) -> type[Any]:
    """Return the class of the model that computes features; for an encoder-decoder, its encoder. Raises ConfigError."""
    kind: Any
    if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:  # T5's encoder, also if it was saved alone
        kind = MODEL_FOR_TEXT_ENCODING_MAPPING[type(config)]
    elif type(config) in MODEL_MAPPING and not config.is_encoder_decoder:
        kind = MODEL_MAPPING[type(config)]
    else:
        raise ConfigError(
            f"{SOURCE_KEY}: transformers has no encoder-only class for model type {config.model_type!r}; choose "
            "another model"
        )
    return kind[0] if isinstance(kind, tuple) else kind


def masked_lm_class(config: PreTrainedConfig) -> type[Any]:
    """Return the masked-LM class around :func:`model_class`. Raises ConfigError if its head is unknown."""
    if config.model_type not in MASKED_LM_HEADS or is_causal(config):
        raise ConfigError(
            f"{SOURCE_KEY}: model.task masked_lm needs an encoder with a masked language-model head (types "
            f"{', '.join(MASKED_LM_HEADS)}); this is a "
            f"{config.model_type}{' decoder' if is_causal(config) else ''}"
        )
    return MODEL_FOR_MASKED_LM_MAPPING[type(config)]  # type: ignore[return-value]


def is_causal(config: Any) -> bool:
    """Test whether a token's features depend on earlier tokens only."""
    own = getattr(config, "is_causal", None)  # decoders made bidirectional set this
    if own is not None:
        return bool(own)
    kind = config.model_type
    if kind in PACKED:
        return PACKED[kind] or bool(getattr(config, "is_decoder", False))  # BERT's classes may be decoders
    # A decoder has a causal language model in transformers and no masked one.
    return (
        kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and kind not in ALWAYS_PADDED
    )


def gated_inner_size(hidden_size: int, multiple: int = 64) -> int:
    return -(-int(_GATED_SHARE * hidden_size) // multiple) * multiple


def _random_config(section: BackboneSection, vocabulary_size: int, pad: int) -> PreTrainedConfig:
    """Return the config of one of :data:`esmeray.model.backbones.source.RANDOM_ARCHITECTURES` at the section's size."""
    layers, hidden_size, heads = random_size(section)
    if section.source == "t5":  # T5 has other names for sizes; gated layers as in T5 1.1
        return T5Config(
            vocab_size=vocabulary_size,
            pad_token_id=pad,
            d_model=hidden_size,
            num_layers=layers,
            num_heads=heads,
            d_kv=hidden_size // heads,
            d_ff=gated_inner_size(hidden_size),
            feed_forward_proj="gated-gelu",
        )
    inner = gated_inner_size(hidden_size)
    no_ids = dict.fromkeys(("bos_token_id", "eos_token_id"))  # the defaults are ids of another vocabulary
    decoder = {"num_key_value_heads": heads, "intermediate_size": inner, **no_ids}
    architectures: dict[str, tuple[Any, dict[str, Any]]] = {
        "bert": (
            BertConfig,
            {
                "intermediate_size": 4 * hidden_size,
                "max_position_embeddings": 4096,
                "attention_probs_dropout_prob": 0.0,  # attention dropout is not supported by the packed kernels
            },
        ),
        # SwiGLU, no biases, norms of queries and keys; inner channels as in the published models
        "esmc": (EsmcConfig, {"intermediate_size": gated_inner_size(hidden_size, multiple=256)}),
        # GeGLU, no biases; every layer attends to all tokens, as packed attention does
        "modernbert": (
            ModernBertConfig,
            {
                "intermediate_size": inner,
                "layer_types": ["full_attention"] * layers,
                **no_ids,
                **dict.fromkeys(("cls_token_id", "sep_token_id")),
            },
        ),
        "qwen2": (Qwen2Config, decoder),
        "llama": (LlamaConfig, decoder),
    }
    kind, own = architectures[section.source]
    return kind(
        vocab_size=vocabulary_size,
        pad_token_id=pad,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        **own,
    )


def _folder_config(section: BackboneSection) -> PreTrainedConfig:
    folder = config_folder(section)
    path = folder / CONFIG_FILE
    kind = model_type(folder)
    settings = read_settings(path, SOURCE_KEY)
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"{SOURCE_KEY}: {path} has model type {kind!r}, which transformers does not have, and custom model "
            "code is never run; choose another model"
        )
    # Before transformers sees them: it would import a quantization library, or load the adapter itself.
    if "quantization_config" in settings:
        raise ConfigError(f"{SOURCE_KEY}: the weights in {folder} are quantized; use a model with fp32, bf16 or fp16")
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{SOURCE_KEY}: {folder} contains an adapter; merge it into its base model and use that folder"
        )
    try:
        return CONFIG_MAPPING[kind].from_dict(settings)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{SOURCE_KEY}: {path} is not a valid {kind} config ({' '.join(str(error).split())})"
        ) from error


def _check_packed(config: PreTrainedConfig) -> None:
    """Refuse an architecture without packed attention; the message names the alternative."""
    if config.model_type not in PACKED:
        raise ConfigError(
            f"{SOURCE_KEY}: packed attention does not support model type {config.model_type!r} (supported: esm, "
            f"{', '.join(PACKED)}); set model.backbone.padded true"
        )
    has_window = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if not PACKED[config.model_type] and (has_window or getattr(config, "is_decoder", False)):
        raise ConfigError(
            f"{SOURCE_KEY}: packed attention does not support a {config.model_type} that is a decoder or has "
            "sliding-window attention (is_decoder and layer_types in its config.json); set model.backbone.padded true"
        )
