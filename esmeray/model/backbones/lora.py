"""Low-rank adapters (Hu et al. 2022) around the layers of a backbone, by peft.

A packed backbone is adapted in place, every weight frozen but the adapters'. A layer's output becomes
``W x + alpha / rank * B A x`` with B zero at the start, so that adapting changes nothing until something is learnt.
"""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.text import did_you_mean, first_line
from esmeray.common.verification import verified
from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.section import LoraSection

ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"

_ADAPTER = "default"
"""peft's name of an adapter that has none; it stands in the names of parameters, not in files."""

_PEFT_PREFIX = "base_model.model."
"""Prefix that a PeftModel gives to names of the module that it wraps, in its files too."""

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


def adapt(backbone: PackedBackbone, section: LoraSection) -> None:
    """Put an adapter around each target layer and freeze everything else; nothing if ``section.rank`` is 0.

    Adapters' first weights come from the global random state. Raises ConfigError (a target names no layer, or the
    backbone is frozen).
    """
    if not section.rank:
        return
    if backbone.frozen:
        raise ConfigError(
            "model.backbone.frozen and model.backbone.lora.rank can't both be set: an adapter freezes the other weights"
        )
    layers = chosen_layers(linear_layers(backbone.model), section.targets)
    from peft import LoraConfig, inject_adapter_in_model  # here, since it loads for seconds what few runs need

    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # divided by the rank, so that any number will do
        lora_dropout=section.dropout,
        target_modules=layers,
        fan_in_fan_out=_is_conv1d(backbone.model.get_submodule(layers[0])),
    )
    inject_adapter_in_model(config, backbone.model, adapter_name=_ADAPTER)
    backbone.lora_export = section.export


def linear_layers(model: nn.Module) -> list[str]:
    """Names of the linear layers that the features of tokens pass through."""
    return [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or _is_conv1d(module)) and not set(_WITHOUT_LOSS) & set(name.split("."))
    ]


def _is_conv1d(module: nn.Module) -> bool:
    """Test for GPT-2's linear layers, by name: importing their class takes seconds, which ESM-2 does without."""
    return type(module).__name__ == "Conv1D"


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


def merge(backbone: PackedBackbone) -> None:
    """Add each update to the weights that it adapts, in their dtype, and remove the adapter; nothing without one."""
    model = backbone.model
    for name, layer in list(_adapted_layers(model)):  # a list: the loop replaces modules
        layer.merge(safe_merge=True)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    model.__dict__.pop("peft_config", None)  # by which transformers and this module know an adapted model
    backbone.lora_export = "merged"


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Weights of the module as if its adapter had been merged; what no adapter touches is not copied."""
    state = base_state(model)
    for name, layer in _adapted_layers(model):
        with torch.no_grad():  # added to a copy, so that training continues with the adapter as it is
            state[f"{name}.weight"] = layer.get_base_layer().weight + layer.get_delta_weight(_ADAPTER)
    return state


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """Weights of the module without its adapter, by the names that they have without one; nothing is copied."""
    own = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in f".{name}"}
    return {name.replace(".base_layer.", "."): tensor for name, tensor in own.items()}


def save_adapter(backbone: PackedBackbone, folder: Path, base: str | None = None, revision: str | None = None) -> None:
    """Write the adapter as peft has it: adapter_config.json and adapter_model.safetensors.

    ``base``: folder or hub name of the weights that it adapts, which peft's own loaders look up.
    """
    model = backbone.model
    config = copy.deepcopy(model.peft_config[_ADAPTER])
    config.inference_mode = True  # as peft saves it: loaded by its own classes, the adapter is frozen
    config.target_modules = sorted(config.target_modules)  # a set, which would be written in another order each time
    config.base_model_name_or_path, config.revision = base, revision
    kind = type(model)
    library = getattr(kind, "library", kind.__module__)
    config.save_pretrained(
        str(folder), auto_mapping_dict={"base_model_class": kind.__name__, "parent_library": library}
    )
    state = {f"{_PEFT_PREFIX}{name}": tensor.contiguous() for name, tensor in _adapter_state(model).items()}
    save_file(state, folder / ADAPTER_WEIGHTS_FILE, metadata={"format": "pt"})


def load_adapter(backbone: PackedBackbone, folder: Path) -> None:
    """Put the adapter that :func:`save_adapter` or peft wrote around the backbone's layers.

    Raises DataError (its files are missing, damaged, or do not fit the backbone).
    """
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

    model = backbone.model
    try:
        verified(folder / ADAPTER_CONFIG_FILE)
        config = LoraConfig.from_pretrained(str(folder))
        state = load_file(verified(folder / ADAPTER_WEIGHTS_FILE))
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
        # peft itself takes a file that lacks weights, and leaves those as they were drawn.
        expected = {f"{_PEFT_PREFIX}{name}": tensor.shape for name, tensor in _adapter_state(model).items()}
        if {name: tensor.shape for name, tensor in state.items()} != expected:
            raise DataError(f"{folder / ADAPTER_WEIGHTS_FILE} does not fit the backbone; export the model again")
        set_peft_model_state_dict(model, state, adapter_name=_ADAPTER)
        backbone.lora_export = "adapter"
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"the adapter in {folder} can't be read ({first_line(error)}); export it again") from error


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    if not hasattr(model, "peft_config"):
        return  # before the import, which takes seconds
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


def _adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Weights of the adapter by the names that peft gives them in files, without its prefix."""
    # save_embedding_layers: peft would otherwise ask the hub for the base's config, to see whether they were resized.
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=_ADAPTER, save_embedding_layers=False)
