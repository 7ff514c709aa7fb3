"""Linear layers of a backbone that an adapter is put around, found by their names alone.

In: the names of all linear layers, ``model.backbone.lora.targets``. Out: those to adapt, or a refusal. Imports no
torch, so that a plan can count the adapter's parameters before a model is built
(:mod:`model.backbones.facts`).
"""

import re

from common.errors import ConfigError
from common.text import did_you_mean

_ATTENTION = (
    ("query", "key", "value", "attention.output.dense"),  # ESM-2, BERT, RoBERTa, ELECTRA
    ("q_proj", "k_proj", "v_proj", "o_proj"),  # Llama, Mistral, Qwen
    ("q", "k", "v", "o"),  # T5
    ("attn.c_attn", "attn.c_proj"),  # GPT-2
    ("q_lin", "k_lin", "v_lin", "out_lin"),  # DistilBERT
    ("attn.Wqkv", "attn.Wo"),  # ModernBERT
)
"""Names of the projections of attention; an architecture has the first set of which it has every name."""

WITHOUT_LOSS = ("contact_head", "pooler", "lm_head")
"""Heads of Hugging Face's modules that no feature of a token passes through."""


def check_not_frozen(frozen: bool) -> None:
    """Refuse an adapter around a frozen backbone. Raises ConfigError (``frozen``)."""
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
        if target == "attention":
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
