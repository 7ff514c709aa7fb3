"""Sources of a backbone: sizes with random weights, local folders, and models on the hub.

Pickles are read only from a local folder, under transformers' names, as tensors only; none is downloaded. Imports
neither torch nor transformers, so that a wrong source is refused early.
"""

from pathlib import Path
from typing import NamedTuple

from esmeray.common.errors import UNUSABLE, ConfigError, did_you_mean
from esmeray.dataset.tokens.model_folder import CONFIG_FILE, fetch, local_folder, read_settings
from esmeray.installation import added
from esmeray.model.section import BackboneSection

SOURCE_KEY = "model.backbone.source"


class BackboneSize(NamedTuple):
    """Layers, channels and attention heads."""

    layers: int
    hidden_size: int
    heads: int


SIZES = {
    "esm2_t6_8M": BackboneSize(6, 320, 20),
    "esm2_t12_35M": BackboneSize(12, 480, 20),
    "esm2_t30_150M": BackboneSize(30, 640, 20),
    "esm2_t33_650M": BackboneSize(33, 1280, 20),
    "esm2_t36_3B": BackboneSize(36, 2560, 40),
    "esm2_t48_15B": BackboneSize(48, 5120, 40),
}
"""Published ESM-2 sizes (Lin et al. 2023, Science 379:1123, table S1)."""

RANDOM_ARCHITECTURES = ("esmc", "modernbert", "bert", "qwen2", "llama", "t5")
"""Architectures with random weights in addition to the sizes of ESM-2, at any size."""

ALWAYS_PADDED = ("t5", "mt5", "umt5")
"""Architectures with relative positions as a bias of the scores, which packed attention does not support."""

PACKED = {
    "bert": False,
    "camembert": False,
    "electra": False,
    "esmc": False,
    "gpt2": True,
    "llama": True,
    "mistral": True,
    "modernbert": False,
    "qwen2": True,
    "qwen3": True,
    "roberta": False,
    "xlm-roberta": False,
}
"""``model_type`` of architectures that use transformers' AttentionInterface and take positions for each token, and
whether they are causal. A test compares each with one sequence at a time."""
PACKED |= added("backbones", tuple(PACKED), bool)

MASKED_LM_HEADS = {
    "bert": ("cls",),
    "camembert": ("lm_head",),
    "electra": ("generator_predictions", "generator_lm_head"),
    "esm": ("lm_head",),
    "esmc": ("lm_head",),
    "modernbert": ("head", "decoder"),
    "roberta": ("lm_head",),
    "xlm-roberta": ("lm_head",),
}
"""Modules from features to logits, in order, in transformers' masked language models. A test compares each with one
sequence at a time."""

_DEFAULT_SIZE = BackboneSize(6, 256, 4)

MODEL_FILE = "esmeray_model.json"
"""File with the task of an exported model."""
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weights of a local folder without safetensors, read without code (``weights_only``)."""
_WEIGHT_PATTERNS = ["model*.safetensors", "model.safetensors.index.json"]


def has_random_weights(section: BackboneSection) -> bool:
    return section.source in SIZES or section.source in RANDOM_ARCHITECTURES


def random_size(section: BackboneSection) -> BackboneSize:
    """Return the size of a randomly initialised backbone; default: 6 layers of 256 channels and 4 heads.

    Raises ConfigError (channels not divisible by heads, or, with rotary positions, an odd number of channels per head).
    """
    default = SIZES.get(section.source, _DEFAULT_SIZE)
    size = BackboneSize(
        section.layers or default.layers, section.hidden_size or default.hidden_size, section.heads or default.heads
    )
    _, hidden_size, heads = size
    multiple = 1 if section.source in ("bert", "t5") else 2  # rotary positions rotate pairs of channels
    if hidden_size % (heads * multiple):
        raise ConfigError(
            f"model.backbone: hidden_size {hidden_size} can't be split into {heads} heads; set "
            f"model.backbone.hidden_size to a multiple of {heads * multiple}, or change model.backbone.heads"
        )
    return size


def config_folder(section: BackboneSection) -> Path:
    """Return the local folder with config.json; weights are not fetched. Raises as :func:`source_type`."""
    return _folder(section, [CONFIG_FILE])


def weights_folder(section: BackboneSection) -> Path:
    """Return the local folder with config.json and weights, fetched if needed. Raises as :func:`source_type`.

    A local folder may have pytorch_model.bin in place of safetensors; pickles are never fetched.
    """
    folder = _folder(section, [CONFIG_FILE, *_WEIGHT_PATTERNS])
    if has_safetensors(folder) or any((folder / name).is_file() for name in _PICKLES):
        return folder
    raise ConfigError(
        f"{SOURCE_KEY}: {section.source} has no safetensors, and other pickles than {_PICKLES[0]} are never read, "
        "since they could run code; convert the weights with save_pretrained of transformers and use that folder"
    )


def has_safetensors(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))


def model_type(folder: Path) -> str:
    """Return the architecture in config.json. Raises ConfigError (no file, or no model_type)."""
    kind = read_settings(folder / CONFIG_FILE, SOURCE_KEY).get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"{SOURCE_KEY}: {folder / CONFIG_FILE} has no model_type; give a Hugging Face model folder")
    # Padding would make it a different model than the package intended.
    if "esmeray.backbones" in UNUSABLE.get(kind, ""):
        raise ConfigError(f"{SOURCE_KEY}: {folder} is a {kind} model, and {UNUSABLE[kind]}")
    return kind


def source_type(section: BackboneSection) -> str:
    """Return the ``model_type`` of the source; "esm" is ESM-2 (or ESM-1b).

    Raises ConfigError (unknown source, impossible size) or ResourceError (the hub can't be reached).
    """
    if has_random_weights(section):
        random_size(section)
        return "esm" if section.source in SIZES else section.source
    return model_type(config_folder(section))


def is_esm2(section: BackboneSection) -> bool:
    """Test for an ESM-2 (or ESM-1b), whose settings are checked against the alphabet. Raises as :func:`source_type`.

    A padded folder may be any model of type esm.
    """
    return source_type(section) == "esm" and (has_random_weights(section) or not section.padded)


def is_padded(section: BackboneSection, kind: str) -> bool:
    return section.padded or kind in ALWAYS_PADDED


def _folder(section: BackboneSection, patterns: list[str]) -> Path:
    """Return the local folder, or a snapshot of these files from the hub; pickles and code are never fetched."""
    source = section.source
    sizes = [*SIZES, *RANDOM_ARCHITECTURES]
    # Refused, not ignored: users would expect a smaller model and train the loaded one.
    sizes_set = [key for key in ("layers", "hidden_size", "heads") if getattr(section, key) is not None]
    if sizes_set:
        raise ConfigError(
            f"model.backbone.{sizes_set[0]} can't be set for trained weights ({source}); remove it, or choose a "
            f"size with random weights: {', '.join(sizes)}"
        )
    folder = local_folder(source, SOURCE_KEY)
    if folder is not None:
        return folder
    if "/" not in source:  # the hub has a few names without an owner, which a misspelt size must not match
        raise ConfigError(
            f"{SOURCE_KEY}: {source!r} is neither a folder nor a known size{did_you_mean(source, sizes)}; use a "
            f"size ({', '.join(sizes)}), a folder, or a hub name such as facebook/esm2_t6_8M_UR50D"
        )
    advice = f"give a local folder, or a size with random weights ({', '.join(sizes)})"
    return fetch(source, patterns, SOURCE_KEY, advice)
