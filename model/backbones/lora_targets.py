"""Linear layers of a backbone that an adapter is put around, found by their names alone.

In: the names of all linear layers, ``model.backbone.lora.targets``. Out: those to adapt, or a refusal. Imports no
torch, so that a plan can count the adapter's parameters before a model is built
(:mod:`model.backbones.facts`).
"""

from __future__ import annotations

import difflib
import re

from common.errors import ConfigError

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


def chosen_layers(layers: list[str], targets: list[str], kind: str) -> list[str]:
    """Names of the layers to adapt.

    ``targets``: ``attention``, ``all-linear``, or the ends of layers' names. Raises ConfigError (a target names no
    linear layer; it lists those there are).
    """
    chosen: dict[str, None] = {}  # in order, once each
    for target in targets:
        if target == "all-linear":
            chosen.update(dict.fromkeys(layers))
        elif target == "attention":
            for name in _attention_names(kind, layers):
                chosen.update(dict.fromkeys(_ending_in(layers, name)))
        elif found := _ending_in(layers, target):
            chosen.update(dict.fromkeys(found))
        else:
            raise _unknown(target, layers)
    return list(chosen)


def _ending_in(layers: list[str], name: str) -> list[str]:
    """As peft matches: the whole name, or its last parts."""
    return [layer for layer in layers if layer == name or layer.endswith(f".{name}")]


def _attention_names(kind: str, layers: list[str]) -> tuple[str, ...]:
    for names in _ATTENTION:
        if all(_ending_in(layers, name) for name in names):
            return names
    raise ConfigError(
        f"model.backbone.lora.targets: what attention's projections are called in {kind} is not known; "
        f"name them: there are {', '.join(_short_names(layers))}"
    )


def _unknown(target: str, layers: list[str]) -> ConfigError:
    there = _short_names(layers)
    near = difflib.get_close_matches(target, there, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return ConfigError(
        f"model.backbone.lora.targets: no linear layer is called {target!r}; {hint}there are attention, all-linear, "
        f"{', '.join(there)}"
    )


def _short_names(layers: list[str]) -> list[str]:
    """Parts of the names after the number of the layer, once each, as a target could name them."""
    return list(dict.fromkeys(re.split(r"\.\d+\.", layer)[-1] for layer in layers))
