"""Facts of a backbone before any of it is built: how many parameters, which linear layers, those that are adapted.

By formula for ESM-2 and the decoders with random weights, so that a plan of the shipped experiments waits for neither
torch nor transformers; any other architecture is built on the meta device, which imports both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from esmeray.common.errors import ConfigError
from esmeray.common.text import did_you_mean
from esmeray.model.backbones.source import esm_settings, gated_inner_size, random_size, source_type
from esmeray.model.section import BackboneSection

if TYPE_CHECKING:
    from torch import nn

    from esmeray.model.backbones.base import PackedBackbone


_PROJECTIONS_WITH_BIAS = {"qwen2": 3, "llama": 0}
"""In each layer of the decoders with random weights."""

_ATTENTION = (
    ("query", "key", "value", "attention.output.dense"),  # ESM-2, BERT, RoBERTa, ELECTRA
    ("q_proj", "k_proj", "v_proj", "o_proj"),  # Llama, Mistral, Qwen
    ("q", "k", "v", "o"),  # T5
    ("attn.c_attn", "attn.c_proj"),  # GPT-2
    ("q_lin", "k_lin", "v_lin", "out_lin"),  # DistilBERT
    ("attn.Wqkv", "attn.Wo"),  # ModernBERT
)
"""Names of the projections of attention; an architecture has the first set of which it has every name."""

_WITHOUT_LOSS = ("contact_head", "pooler", "lm_head")
"""Heads of Hugging Face's modules that no feature of a token passes through."""


@dataclass(frozen=True)
class BackboneFacts:
    """Facts of a backbone before it is built.

    Attributes:
        unused: parameters that no feature of a token passes through, which are never trained.
        linear: inputs and outputs of each linear layer that features pass through, by name.
        causal: whether a token's features know of earlier tokens alone.
        longest: tokens of the longest sequence, special ones included; None if any can be taken.
    """

    hidden_size: int
    parameters: int
    unused: int
    linear: dict[str, tuple[int, int]]
    causal: bool = False
    padded: bool = False
    longest: int | None = None


def backbone_facts(section: BackboneSection, vocabulary_size: int, pad: int = 0) -> BackboneFacts:
    """Facts of the backbone that :func:`esmeray.model.backbones.loading.build_backbone` builds.

    Raises ConfigError (unknown source, impossible size, or an architecture that is not known packed) or ResourceError
    (its config is on the hub, which can't be reached).
    """
    if source_type(section) == "esm" and not section.padded:
        return esm_facts(esm_settings(section))
    if section.source in _PROJECTIONS_WITH_BIAS:
        return _decoder_facts(section, vocabulary_size)
    from esmeray.model.backbones.loading import build_backbone  # here: a formula needs neither torch nor transformers

    # Not frozen, so that what is never trained stands apart.
    recomputed = section.gradient_checkpointing and not section.frozen
    trained = section.model_copy(update={"frozen": False, "gradient_checkpointing": recomputed})
    return facts_of(build_backbone(trained, 0, vocabulary_size, pad, empty=True))


def esm_facts(settings: dict[str, Any]) -> BackboneFacts:
    """Facts of an EsmModel with these settings (:func:`esmeray.model.backbones.source.esm_settings`)."""
    layers, D, V = settings["num_hidden_layers"], settings["hidden_size"], settings["vocab_size"]
    inner = settings["intermediate_size"]
    absolute = settings["position_embedding_type"] == "absolute"
    positions = settings["max_position_embeddings"] if absolute else 0
    names = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
    of_layer = dict.fromkeys(names, (D, D)) | {"intermediate.dense": (D, inner), "output.dense": (inner, D)}
    linear = _repeated("encoder.layer", layers, of_layer)
    weights_and_biases = sum((inputs + 1) * outputs for inputs, outputs in linear.values())
    # Two norms a layer and the last one, and before the layers another in ESM-1b: a weight and a bias each.
    norms = (4 * layers + 2 + 2 * bool(settings["emb_layer_norm_before"])) * D
    contact_head = layers * settings["num_attention_heads"] + 1  # a logistic regression on all attention maps
    return BackboneFacts(
        D,
        weights_and_biases + norms + (V + positions) * D + contact_head,
        contact_head,
        linear,
        longest=positions - settings["pad_token_id"] - 1 if absolute else None,  # positions start after the padding id
    )


def _decoder_facts(section: BackboneSection, V: int) -> BackboneFacts:
    """Facts of a decoder whose weights are random: one norm before each of a layer's two parts, and one at the end."""
    layers, D, _ = random_size(section)
    biases = _PROJECTIONS_WITH_BIAS[section.source]
    inner = gated_inner_size(D)
    of_layer = dict.fromkeys((f"self_attn.{name}_proj" for name in "qkvo"), (D, D))
    of_layer |= {"mlp.gate_proj": (D, inner), "mlp.up_proj": (D, inner), "mlp.down_proj": (inner, D)}
    linear = _repeated("layers", layers, of_layer)
    weights = sum(inputs * outputs for inputs, outputs in linear.values())
    parameters = weights + (V + (2 + biases) * layers + 1) * D
    return BackboneFacts(D, parameters, 0, linear, causal=True, padded=section.padded)


def _repeated(prefix: str, layers: int, of_layer: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {f"{prefix}.{layer}.{name}": shape for layer in range(layers) for name, shape in of_layer.items()}


def facts_of(backbone: PackedBackbone) -> BackboneFacts:
    """The facts of :func:`backbone_facts`, from a backbone that is not frozen."""
    from esmeray.model.backbones.huggingface import PaddedBackbone

    parameters = list(backbone.parameters())
    return BackboneFacts(
        backbone.hidden_size,
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if not p.requires_grad),
        linear_layers(backbone.model),
        causal=backbone.causal,
        padded=isinstance(backbone, PaddedBackbone),
        longest=backbone.longest,
    )


def linear_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear layers that the features of tokens pass through, by name."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    shapes = {}
    for name, module in model.named_modules():
        # GPT-2 has Conv1D, whose weights lie the other way round.
        if isinstance(module, nn.Linear | Conv1D) and not set(_WITHOUT_LOSS) & set(name.split(".")):
            rows, columns = module.weight.shape
            shapes[name] = (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)
    return shapes


def check_not_frozen(frozen: bool) -> None:
    if frozen:
        raise ConfigError(
            "model.backbone.frozen and model.backbone.lora.rank can't both be set: an adapter freezes the other weights"
        )


def chosen_layers(layers: list[str], targets: list[str]) -> list[str]:
    """Names of the layers to adapt, of the linear layers that the features of tokens pass through.

    ``targets``: ``attention``, ``all-linear``, or the ends of layers' names. Raises ConfigError (a target names no
    linear layer; it lists those there are).
    """
    chosen: dict[str, None] = {}  # in order, once each
    for target in targets:
        ends: tuple[str, ...] = (target,)
        if target == "attention":  # an architecture without a known set has no layer to match, and is refused below
            ends = next((names for names in _ATTENTION if all(_ending_in(layers, name) for name in names)), ())
        matching = layers if target == "all-linear" else [layer for name in ends for layer in _ending_in(layers, name)]
        if not matching:
            # Parts of the names after the number of the layer, once each, as a target could name them.
            there = list(dict.fromkeys(re.split(r"\.\d+\.", layer)[-1] for layer in layers))
            raise ConfigError(
                f"model.backbone.lora.targets: no linear layer is called {target!r}{did_you_mean(target, there)}; "
                f"there are {', '.join(there)}, and all-linear"
            )
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def _ending_in(layers: list[str], name: str) -> list[str]:
    """Match as peft does: the whole name, or its last parts."""
    return [layer for layer in layers if layer == name or layer.endswith(f".{name}")]
