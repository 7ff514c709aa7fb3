"""Low-rank adapters (Hu et al. 2022) around the layers of a backbone, by peft.

A packed backbone is adapted in place; all weights except the adapters' are frozen. A layer's output becomes ``W x +
alpha / rank * B A x``. B is zero at the start, so the output is unchanged before training.
"""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from esmeray.common.errors import ConfigError, DataError, ResourceError, did_you_mean, first_line, parsing, read_json
from esmeray.common.publishing import verified
from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.section import LoraSection

ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"

_ADAPTER = "default"
"""peft's name of an unnamed adapter; it is part of parameter names, but not of names in files."""

_PEFT_PREFIX = "base_model.model."
"""Prefix that a PeftModel adds to the wrapped module's names, also in files."""

_REMEDY = "export the model again"
_BASE_FOLDER = "base"
"""Folder of an adapter's base in an export, if its weights were random and exist nowhere else."""

_SNAPSHOT = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)/snapshots/(?P<revision>[0-9a-f]{40})/?$")
"""Folder of a download in the hub's cache (layout as documented by huggingface_hub)."""

_WEIGHT_PATTERNS = ["config.json", "model*.safetensors", "model.safetensors.index.json"]

_ATTENTION = (
    ("query", "key", "value", "attention.output.dense"),  # ESM-2, BERT, RoBERTa, ELECTRA
    ("q_proj", "k_proj", "v_proj", "o_proj"),  # Llama, Mistral, Qwen
    ("q", "k", "v", "o"),  # T5
    ("attn.c_attn", "attn.c_proj"),  # GPT-2
    ("q_lin", "k_lin", "v_lin", "out_lin"),  # DistilBERT
    ("attn.Wqkv", "attn.Wo"),  # ModernBERT
)
"""Names of attention projections. An architecture uses the first set whose names it all has."""

_WITHOUT_LOSS = ("contact_head", "pooler", "lm_head")
"""Heads of Hugging Face's modules that no token's features pass through."""


def adapt(backbone: PackedBackbone, section: LoraSection) -> None:
    """Add an adapter to each target layer and freeze everything else; does nothing if ``section.rank`` is 0.

    Adapters are initialised from the global random state. Raises ConfigError (a target names no layer, or the backbone
    is frozen).
    """
    if not section.rank:
        return
    if backbone.frozen:
        raise ConfigError(
            "model.backbone.frozen and model.backbone.lora.rank can't both be set: an adapter already freezes "
            "the other weights"
        )
    layers = chosen_layers(backbone.model, section.targets)
    from peft import LoraConfig, inject_adapter_in_model  # imported here: it takes seconds, and few runs need it

    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # divided by the rank, so that any number will do
        target_modules=layers,
        fan_in_fan_out=_is_conv1d(backbone.model.get_submodule(layers[0])),
    )
    inject_adapter_in_model(config, backbone.model, adapter_name=_ADAPTER)
    backbone.lora_export = section.export


def _is_conv1d(module: nn.Module) -> bool:
    """Test for GPT-2's linear layers by name: importing their class takes seconds."""
    return type(module).__name__ == "Conv1D"


def chosen_layers(model: nn.Module, targets: list[str]) -> list[str]:
    """Return the names of the layers to adapt, among the linear layers that token features pass through.

    ``targets``: ``attention``, ``all-linear``, or suffixes of layers' names. Raises ConfigError (a target matches no
    linear layer; the message lists them).
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) or _is_conv1d(module)]
    layers = [name for name in linear if not set(_WITHOUT_LOSS).intersection(name.split("."))]
    chosen: dict[str, None] = {}  # ordered, without repeats
    for target in targets:
        ends: tuple[str, ...] = (target,)
        if target == "attention":  # an architecture without a known set matches no layer, and is refused below
            ends = next((names for names in _ATTENTION if all(_ending_in(layers, name) for name in names)), ())
        matching = [layer for name in ends for layer in _ending_in(layers, name)]
        if target == "all-linear":
            matching = layers
        if not matching:
            # Parts of the names after the layer's number, as a target could name them.
            available = list(dict.fromkeys(re.split(r"\.\d+\.", layer)[-1] for layer in layers))
            raise ConfigError(
                "model.backbone.lora.targets: no linear layer is named "
                f"{target!r}{did_you_mean(target, available)}; available: {', '.join(available)}, all-linear"
            )
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def _ending_in(layers: list[str], name: str) -> list[str]:
    """Match as peft does: the whole name, or its last components."""
    return [layer for layer in layers if layer == name or layer.endswith(f".{name}")]


def merge(backbone: PackedBackbone) -> None:
    """Add each update to its weights, in their dtype, and remove the adapter; does nothing without one."""
    model = backbone.model
    for name, layer in list(_adapted_layers(model)):  # a list, since the loop replaces modules
        layer.merge(safe_merge=True)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    model.__dict__.pop("peft_config", None)  # transformers and this module recognise an adapted model by it
    backbone.lora_export = "merged"


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the module's weights as if its adapter were merged; other weights are not copied."""
    state = base_state(model)
    for name, layer in _adapted_layers(model):
        with torch.no_grad():  # added to a copy, so that training can continue with the adapter
            state[f"{name}.weight"] = layer.get_base_layer().weight + layer.get_delta_weight(_ADAPTER)
    return state


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the module's weights without its adapter, by their original names; nothing is copied."""
    own = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in f".{name}"}
    return {name.replace(".base_layer.", "."): tensor for name, tensor in own.items()}


def write_adapter(
    backbone: PackedBackbone, folder: Path, write_base: Callable[[Path], object], network: nn.Module | None = None
) -> str:
    """Write the adapter, and its base if that exists nowhere else. Returns the base as Python source, for the card.

    ``write_base`` writes the base without the adapter. ``network``: as for :func:`save_adapter`. The base has its own
    folder: next to a config.json, transformers would load the adapter unasked.
    """
    # transformers stores the source of loaded weights there; it is empty for random weights.
    source = getattr(backbone.config, "_name_or_path", "") or ""
    snapshot = _SNAPSHOT.search(source)
    if snapshot is not None:
        # Use name and revision, since another machine's cache has other paths.
        name, revision = f"{snapshot['owner']}/{snapshot['name']}", snapshot["revision"]
        save_adapter(backbone, folder, network, base=name, revision=revision)
        return f"{name!r}, revision={revision!r}"
    base = str(Path(source).absolute()) if source and Path(source).is_dir() else _BASE_FOLDER
    if base == _BASE_FOLDER:
        write_base(folder / base)  # the weights were random
    save_adapter(backbone, folder, network, base=base)
    return f'f"{{folder}}/{base}"' if base == _BASE_FOLDER else repr(base)


def save_adapter(
    backbone: PackedBackbone,
    folder: Path,
    network: nn.Module | None = None,
    base: str | None = None,
    revision: str | None = None,
) -> None:
    """Write the adapter in peft's format: adapter_config.json and adapter_model.safetensors.

    ``network``: model of transformers that peft wraps, around the backbone's; by default the backbone's own. ``base``:
    folder or hub name of the adapted weights, which peft's loaders look up.
    """
    model = backbone.model
    config = copy.deepcopy(model.peft_config[_ADAPTER])
    config.inference_mode = True  # as peft saves it: an adapter loaded by peft is frozen
    # Whole names: peft shortens them to suffixes that are unique in the backbone, but may match layers of a head.
    config.target_modules = sorted(name for name, _ in _adapted_layers(model))
    config.base_model_name_or_path, config.revision = base, revision
    kind = type(model if network is None else network)
    library = getattr(kind, "library", kind.__module__)
    config.save_pretrained(
        str(folder), auto_mapping_dict={"base_model_class": kind.__name__, "parent_library": library}
    )
    prefix = _PEFT_PREFIX if network is None else f"{_PEFT_PREFIX}{network.base_model_prefix}."
    state = {f"{prefix}{name}": tensor.contiguous() for name, tensor in _adapter_state(model).items()}
    save_file(state, folder / ADAPTER_WEIGHTS_FILE, metadata={"format": "pt"})


def has_adapter(folder: str | Path) -> bool:
    return (Path(folder) / ADAPTER_CONFIG_FILE).is_file()


def base_folder(folder: Path) -> Path:
    """Return the local folder of the adapter's base model, fetched if needed.

    Raises DataError if a local base is missing, ResourceError if the hub, which has the base, can't be reached.
    """
    path = folder / ADAPTER_CONFIG_FILE
    settings = read_json(verified(path), _REMEDY)
    with parsing(path, _REMEDY):
        source, revision = str(settings["base_model_name_or_path"]), settings["revision"]
    # Look in the export first: the working directory may contain a folder of the same name.
    for candidate in (folder / source, Path(source)):
        if candidate.is_dir():
            return candidate
    # Without a revision the base was a folder, so the hub does not have it.
    if revision is None:
        raise DataError(
            f"{path}: the adapter's base model {source} is missing; restore it, or export with lora.export merged"
        )
    from huggingface_hub import snapshot_download  # imported here: few callers need it, and it is slow to import
    from huggingface_hub.errors import HTTPError

    try:
        # The patterns exclude pickles and code.
        return Path(snapshot_download(source, revision=revision, allow_patterns=_WEIGHT_PATTERNS))
    except (OSError, HTTPError) as error:
        raise ResourceError(
            f"{path}: the adapter's base model {source} at {revision} is not in the local cache, and the hub "
            "can't be reached"
        ) from error


def load_adapter(backbone: PackedBackbone, folder: Path) -> None:
    """Add the adapter that :func:`save_adapter` or peft wrote to the backbone's layers.

    Raises DataError (files are missing, damaged, or do not match the backbone).
    """
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

    model = backbone.use_final_norm().model  # as in training
    try:
        verified(folder / ADAPTER_CONFIG_FILE)
        config = LoraConfig.from_pretrained(str(folder))
        state = load_file(verified(folder / ADAPTER_WEIGHTS_FILE))
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
        # peft accepts a file that lacks weights, and keeps their initial values.
        expected = {f"{_PEFT_PREFIX}{name}": tensor.shape for name, tensor in _adapter_state(model).items()}
        if not expected.keys() & state.keys():  # of a masked language model: without the backbone's name in it
            state = {
                _PEFT_PREFIX + name.removeprefix(_PEFT_PREFIX).partition(".")[2]: tensor
                for name, tensor in state.items()
            }
        if {name: tensor.shape for name, tensor in state.items()} != expected:
            raise DataError(f"{folder / ADAPTER_WEIGHTS_FILE} does not fit the backbone; export the model again")
        set_peft_model_state_dict(model, state, adapter_name=_ADAPTER)
        backbone.lora_export = "adapter"
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"the adapter in {folder} can't be read ({first_line(error)}); export it again") from error


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    if not hasattr(getattr(model, "base_model", model), "peft_config"):  # the model may have a head
        return  # before the import, which takes seconds
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


def _adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapter's weights by peft's names in files, without its prefix."""
    # save_embedding_layers: peft would otherwise query the hub for the base's config, to check for resized embeddings.
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=_ADAPTER, save_embedding_layers=False)
