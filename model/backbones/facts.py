"""Facts of a backbone before any of it is built: how many parameters, which linear layers, what it can take.

In: the backbone section of the config. Out: :class:`BackboneFacts`, by formula for ESM-2 and for what can be drawn at
random, so that a plan and a refusal wait for neither torch nor transformers; a folder of another architecture is built
on the meta device, which imports both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from model.backbones import source as backbone_source
from model.backbones.esm2_sizes import SIZES, check_heads, has_random_weights, read_esm_settings
from model.backbones.source import RANDOM_ARCHITECTURES
from train_config.schema import BackboneSection

BERT_POSITIONS = 4096
T5_BUCKETS = 32
"""Relative positions that T5 tells apart (transformers' ``relative_attention_num_buckets``)."""

_DEFAULT_LAYERS, _DEFAULT_HIDDEN_SIZE, _DEFAULT_HEADS = 6, 256, 4
_GATED_SHARE = 8 / 3
"""Inner channels of a gated feed-forward layer per channel: with three matrices, as many parameters as with two of 4
(Shazeer 2020, section 3)."""

_INNER_MULTIPLE = 64


@dataclass(frozen=True)
class BackboneFacts:
    """Facts of a backbone before it is built.

    Attributes:
        kind: what to call the architecture in messages.
        hidden_size: channels of the features.
        parameters: of all of it.
        unused: of these, those that no feature of a token passes through, which are never trained.
        linear: inputs and outputs of each linear layer that features pass through, by name.
        causal: whether a token's features know of earlier tokens alone.
        padded: whether it gets padded batches.
        longest: tokens of the longest sequence, special ones included; None if any can be taken.
    """

    kind: str
    hidden_size: int
    parameters: int
    unused: int
    linear: dict[str, tuple[int, int]]
    causal: bool = False
    padded: bool = False
    longest: int | None = None


class RandomSize(NamedTuple):
    """Layers, channels, attention heads, and inner channels of the feed-forward layers."""

    layers: int
    hidden_size: int
    heads: int
    inner: int


def backbone_facts(section: BackboneSection, vocabulary_size: int, pad: int = 0) -> BackboneFacts:
    """Facts of the backbone that :func:`model.backbones.huggingface.build_backbone` builds.

    Args:
        section: which one.
        vocabulary_size: of the tokenizer, for what is drawn at random.
        pad: its padding token.

    Raises:
        ConfigError: unknown source, impossible size, or an architecture that is not known packed.
        ResourceError: its config is on the hub, which can't be reached.
    """
    if section.source in RANDOM_ARCHITECTURES:
        return _RANDOM_FACTS[section.source](random_size(section), vocabulary_size, section.padded)
    if has_random_weights(section) or (not section.padded and _is_esm(section)):
        return esm_facts(read_esm_settings(section), padded=section.padded)
    from model.backbones.huggingface import (  # here: torch and transformers, which the others don't need
        empty_backbone,
        facts_of,
    )

    # Not frozen, so that what is never trained stands apart.
    recomputed = section.gradient_checkpointing and not section.frozen
    trained = section.model_copy(update={"frozen": False, "gradient_checkpointing": recomputed})
    return facts_of(empty_backbone(trained, vocabulary_size, pad))


def check_source(section: BackboneSection) -> None:
    """Refuse a source or a size that can't be, before anything is read or imported.

    Raises:
        ConfigError, ResourceError: as :func:`backbone_facts`.
    """
    if section.source in RANDOM_ARCHITECTURES:
        random_size(section)
    elif has_random_weights(section):
        read_esm_settings(section)
    else:
        _config_folder(section)


def random_size(section: BackboneSection) -> RandomSize:
    """Size of an architecture of :data:`RANDOM_ARCHITECTURES`; 6 layers of 256 channels and 4 heads where none is set.

    Raises:
        ConfigError: the channels can't be split over the heads.
    """
    hidden_size = section.hidden_size or _DEFAULT_HIDDEN_SIZE
    heads = section.heads or _DEFAULT_HEADS
    check_heads(hidden_size, heads, rotary=section.source in ("qwen2", "llama"))
    gated = -(-int(_GATED_SHARE * hidden_size) // _INNER_MULTIPLE) * _INNER_MULTIPLE
    inner = 4 * hidden_size if section.source == "bert" else gated
    return RandomSize(section.layers or _DEFAULT_LAYERS, hidden_size, heads, inner)


def esm_facts(settings: dict[str, Any], *, padded: bool = False) -> BackboneFacts:
    """Facts of an EsmModel.

    Args:
        settings: of :func:`model.backbones.esm2_sizes.read_esm_settings`.
        padded: built as transformers builds it alone, with a pooler.
    """
    layers, D, V = settings["num_hidden_layers"], settings["hidden_size"], settings["vocab_size"]
    absolute = settings["position_embedding_type"] == "absolute"
    positions = settings["max_position_embeddings"] if absolute else 0
    linear = _bert_layers(layers, D, settings["intermediate_size"])
    norms = (4 * layers + 2 + 2 * bool(settings["emb_layer_norm_before"])) * D
    unused = layers * settings["num_attention_heads"] + 1 + padded * (D * D + D)  # contact head, pooler
    return BackboneFacts(
        "EsmModel",
        D,
        _weights(linear) + _biases(linear) + norms + (V + positions) * D + unused,
        unused,
        linear,
        padded=padded,
        longest=positions - settings["pad_token_id"] - 1 if absolute else None,
    )


def _bert_facts(size: RandomSize, V: int, padded: bool) -> BackboneFacts:
    layers, D, _, inner = size
    linear = _bert_layers(layers, D, inner)
    embeddings, norms = (V + BERT_POSITIONS + 2) * D, (4 * layers + 2) * D  # 2 types of tokens
    unused = D * D + D  # pooler
    parameters = _weights(linear) + _biases(linear) + embeddings + norms + unused
    return BackboneFacts("BertModel", D, parameters, unused, linear, padded=padded, longest=BERT_POSITIONS)


def _bert_layers(layers: int, D: int, inner: int) -> dict[str, tuple[int, int]]:
    """Linear layers of BERT and ESM-2, each with a bias."""
    names = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
    of_layer = dict.fromkeys(names, (D, D)) | {"intermediate.dense": (D, inner), "output.dense": (inner, D)}
    return _repeated("encoder.layer", layers, of_layer)


def _decoder_facts(kind: str, biases: int, size: RandomSize, V: int, padded: bool) -> BackboneFacts:
    """Llama, or Qwen2, whose queries, keys and values have a bias."""
    layers, D, _, inner = size
    of_layer = dict.fromkeys((f"self_attn.{name}_proj" for name in "qkvo"), (D, D))
    of_layer |= {"mlp.gate_proj": (D, inner), "mlp.up_proj": (D, inner), "mlp.down_proj": (inner, D)}
    linear = _repeated("layers", layers, of_layer)
    parameters = _weights(linear) + (V + (2 + biases) * layers + 1) * D
    return BackboneFacts(kind, D, parameters, 0, linear, causal=True, padded=padded)


def _t5_facts(size: RandomSize, V: int, padded: bool) -> BackboneFacts:
    """T5's encoder, which always gets padded batches."""
    layers, D, heads, inner = size
    width = D // heads * heads
    of_layer = dict.fromkeys((f"layer.0.SelfAttention.{name}" for name in "qkv"), (D, width))
    of_layer["layer.0.SelfAttention.o"] = (width, D)
    of_layer |= dict.fromkeys((f"layer.1.DenseReluDense.{name}" for name in ("wi_0", "wi_1")), (D, inner))
    of_layer["layer.1.DenseReluDense.wo"] = (inner, D)
    linear = _repeated("encoder.block", layers, of_layer)
    parameters = _weights(linear) + (V + 2 * layers + 1) * D + T5_BUCKETS * heads
    return BackboneFacts("T5EncoderModel", D, parameters, 0, linear, padded=True)


_RANDOM_FACTS = {
    "bert": _bert_facts,
    "qwen2": lambda *arguments: _decoder_facts("Qwen2Model", 3, *arguments),
    "llama": lambda *arguments: _decoder_facts("LlamaModel", 0, *arguments),
    "t5": _t5_facts,
}


def _is_esm(section: BackboneSection) -> bool:
    return backbone_source.folder_model_type(_config_folder(section)) == "esm"


def _config_folder(section: BackboneSection) -> Path:
    return backbone_source.config_folder(section, [*SIZES, *RANDOM_ARCHITECTURES])


def _repeated(prefix: str, layers: int, of_layer: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {f"{prefix}.{layer}.{name}": shape for layer in range(layers) for name, shape in of_layer.items()}


def _weights(linear: dict[str, tuple[int, int]]) -> int:
    return sum(inputs * outputs for inputs, outputs in linear.values())


def _biases(linear: dict[str, tuple[int, int]]) -> int:
    return sum(outputs for _, outputs in linear.values())
