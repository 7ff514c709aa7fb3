"""Networks of transformers: chosen by a config.json, loaded or initialised, and rebuilt for an export.

A config.json is read as data: its ``model_type`` selects one of transformers' own classes; code that it names is never
run. An export has the parameters of the backbone.

Separate from :mod:`esmeray.model.backbones.loading`, which imports it on demand: importing transformers' models takes
seconds, and ESM-2 does not need them.
"""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    BertConfig,
    EsmcConfig,
    EsmConfig,
    EsmForMaskedLM,
    EsmModel,
    LlamaConfig,
    ModernBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    T5Config,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    MODEL_MAPPING,
)

from esmeray.common.errors import ConfigError, DataError, first_line
from esmeray.common.publishing import verified
from esmeray.dataset.tokens.model_folder import CONFIG_FILE, quiet_transformers, read_settings
from esmeray.model.backbones import esm2_network
from esmeray.model.backbones.base import PackedBackbone, empty_weights, layer_list
from esmeray.model.backbones.huggingface import HuggingFaceBackbone, PaddedBackbone, is_causal
from esmeray.model.backbones.source import (
    MASKED_LM_HEADS,
    PACKED,
    SOURCE_KEY,
    config_folder,
    has_random_weights,
    has_safetensors,
    is_padded,
    model_type,
    random_size,
    weights_folder,
)
from esmeray.model.backbones.stored_weights import warn_left_out
from esmeray.model.section import BackboneSection

_GATED_SHARE = 8 / 3
"""Inner channels per channel of a gated feed-forward layer: three matrices then have as many parameters as two with a
factor of 4 (Shazeer 2020, section 3)."""
_MAY_BE_MISSING = {"contact_head", "pooler", *(name for names in MASKED_LM_HEADS.values() for name in names)}
"""Heads whose weights a folder may lack; they are then randomly initialised."""
_ROTARY = "rotary_embeddings.inv_freq"


def features_network(section: BackboneSection, vocabulary_size: int, pad: int, empty: bool) -> PreTrainedModel:
    """Return the model that computes features; random weights use the global random state.

    Raises as :func:`esmeray.model.backbones.loading.build_backbone`.
    """
    config = read_config(section, vocabulary_size, pad)
    return _network(section, config, model_class(config), empty)


def masked_lm(
    section: BackboneSection, vocabulary_size: int, pad: int, empty: bool
) -> tuple[PreTrainedModel, nn.Module, bool]:
    """Return the same model, its masked-LM head, and whether the folder has weights but none for the head.

    Raises as :func:`esmeray.model.backbones.loading.build_masked_lm`.
    """
    config = read_config(section, vocabulary_size, pad)
    network = _network(section, config, masked_lm_class(config), empty)
    names = MASKED_LM_HEADS[config.model_type]
    heads = [getattr(network, name) for name in names]
    head: nn.Module = heads[0] if len(heads) == 1 else nn.Sequential(*heads)
    return network.base_model, head, any(key.split(".")[0] in names for key in getattr(network, "drawn_weights", ()))


def read_config(section: BackboneSection, vocabulary_size: int, pad: int) -> PreTrainedConfig:
    """Return the config that the section describes; from the hub, only config.json is fetched.

    With random weights, ``vocabulary_size`` is the number of rows of the embedding, and ``pad`` the id whose embedding
    is 0 and not learnt. Supports any architecture except ESM-2, which is supported if padded. Raises ConfigError
    (unknown source, impossible size, or an architecture without packed attention) or ResourceError (the hub can't be
    reached).
    """
    config = _random_config(section, vocabulary_size, pad) if has_random_weights(section) else _folder_config(section)
    if is_padded(section, config.model_type):
        return config
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


def gated_inner_size(hidden_size: int, multiple: int = 64) -> int:
    return -(-int(_GATED_SHARE * hidden_size) // multiple) * multiple


def wrapped(network: nn.Module, section: BackboneSection, pad: int, settings: dict[str, Any]) -> PackedBackbone:
    """Return the backbone around a network; padded if the section or the architecture requires it."""
    model = transformers_network(network)
    if is_padded(section, model.config.model_type):
        return PaddedBackbone(model, pad=pad, **settings)
    return HuggingFaceBackbone(model, **settings)


def transformers_network(network: Any, state: dict[str, Tensor] | None = None) -> PreTrainedModel:
    """Return transformers' class with the same parameters, to save or to run its own forward; nothing is copied.

    ``network``: any class, with or without a language-model head. ``state``: overrides the network's own state, if it
    has an adapter.
    """
    if isinstance(network, PreTrainedModel):
        return network
    with empty_weights():  # its own weights are replaced immediately
        if isinstance(network, esm2_network.EsmModel):
            model: Any = EsmModel(_esm_config(network.config), add_pooling_layer=False)
        else:
            model = EsmForMaskedLM(_esm_config(network.esm.config))
    model.load_state_dict(network.state_dict() if state is None else state, assign=True)
    model.tie_weights()
    # Not part of the state: a buffer on the meta device could not be moved.
    numbers = torch.arange(model.config.max_position_embeddings).expand(1, -1)
    model.base_model.embeddings.position_ids = nn.Buffer(numbers, persistent=False)
    return model


def masked_lm_network(backbone: PackedBackbone, head: nn.Module) -> PreTrainedModel:
    """Return the Hugging Face model with the same parameters, to be saved; nothing is copied."""
    config = backbone.config
    names = MASKED_LM_HEADS[config.model_type]
    if isinstance(config, esm2_network.EsmConfig):
        config = _esm_config(config)
    with empty_weights():  # its own weights are replaced immediately
        network: PreTrainedModel = masked_lm_class(config)(config)
    setattr(network, network.base_model_prefix, backbone.model)
    for name, module in zip(names, [head] if len(names) == 1 else head.children(), strict=True):
        setattr(network, name, module)
    return network


def save_network(network: PreTrainedModel, folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """Write config.json and model.safetensors with the tensor names used on the hub.

    ``state``: overrides the network's own. transformers 5.23 would write ESM's tensors under names that only it reads
    (``LayerNorm.gamma``, and one ``encoder.layer.*.attention.self.rotary_embeddings.inv_freq`` for all layers).
    """
    state = {**(network.state_dict() if state is None else state)}
    is_esm = network.config.model_type == "esm"
    for name in [name for name in state if is_esm and name.endswith(_ROTARY)]:
        frequencies = state.pop(name)
        for layer in range(network.config.num_hidden_layers):
            own_name = f"{name.removesuffix(_ROTARY)}encoder.layer.{layer}.attention.self.{_ROTARY}"
            state[own_name] = frequencies.clone()  # tensors that share memory would be written once only
    with quiet_transformers():  # no progress bar
        network.save_pretrained(folder, state_dict=state, save_original_format=not is_esm)


def save_first_layers(backbone: PackedBackbone, layer: int, folder: Path) -> None:
    """Write a backbone without the layers after this one, like :func:`save_network`; removes them from it, too."""
    network: Any = transformers_network(backbone.model)
    is_cut = layer < backbone.num_layers
    if is_cut:
        del layer_list(network, backbone.num_layers)[1][layer:]
        network.config.num_hidden_layers = layer
        if getattr(network.config, "layer_types", None):
            network.config.layer_types = network.config.layer_types[:layer]
        # transformers' setting for a last hidden state without the final norm.
        network.config.tie_last_hidden_states = False
    # Heads that read the last layer or the attention of all layers are left out.
    heads = ("contact_head.", "pooler.") if is_cut else ()
    state = {name: tensor for name, tensor in network.state_dict().items() if not name.startswith(heads)}
    save_network(network, folder, state)


def load_esm(folder: Path, config: esm2_network.EsmConfig) -> Any:
    """Return transformers' EsmForMaskedLM with the pickle of a local folder; raises DataError as for other networks."""
    with quiet_transformers():
        return _load_weights(EsmForMaskedLM, folder, _esm_config(config))


def _esm_config(config: esm2_network.EsmConfig) -> EsmConfig:
    return EsmConfig.from_dict(config.to_dict())


def _network(section: BackboneSection, config: PreTrainedConfig, kind: type[Any], empty: bool) -> Any:
    with quiet_transformers():
        has_no_file = empty or has_random_weights(section)
        return kind(config) if has_no_file else _load_weights(kind, weights_folder(section), config)


def _load_weights(kind: type[Any], folder: Path, config: PreTrainedConfig) -> Any:
    """Return a Hugging Face model with the weights of a local folder, in fp32 on the CPU; heads may be missing."""
    for path in sorted(folder.glob("model*.safetensors*")):
        verified(path)
    try:
        network, info = kind.from_pretrained(
            folder,
            config=config,
            output_loading_info=True,
            use_safetensors=has_safetensors(folder),  # pickles are read with weights_only, without code
            weights_only=True,
            local_files_only=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # reported in one line below; transformers would print a table and raise
        )
    except (SafetensorError, OSError, ValueError, RuntimeError, EOFError) as error:
        raise DataError(
            f"the weights in {folder} can't be read ({first_line(error)}); fetch or export them again"
        ) from error
    except UnpicklingError as error:  # its message recommends letting the pickle run code
        raise DataError(
            f"{folder}: the weights are damaged, or a pickle that could run code; convert them to safetensors"
        ) from error
    # transformers initialises missing weights randomly and only warns: the features would be noise.
    missing = [f"lack {key}" for key in sorted(info["missing_keys"]) if not _MAY_BE_MISSING & set(key.split("."))]
    other = [f"do not have the shape in config.json for {key}" for key in sorted(map(str, info["mismatched_keys"]))]
    if problems := missing + other:
        raise DataError(f"the weights in {folder} {problems[0]}; fetch or export them again")
    network.drawn_weights = frozenset(info["missing_keys"])
    warn_left_out(folder, info["unexpected_keys"])
    return network


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
