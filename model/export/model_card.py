"""The model card of an export: what the model is, what it was trained on, how well it does, how to open it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData

from model.tasks.autoencoder import ESM2Autoencoder
from model.tasks.base import TaskModel

_OPEN_AUTOENCODER = """from model.tasks.autoencoder import ESM2Autoencoder

autoencoder = ESM2Autoencoder.from_pretrained("FOLDER")
latents = autoencoder.encode(["MKTAYIAKQR"])       # one (residues, channels) tensor for each sequence
features, residue_logits = autoencoder.decode(latents)
```

The backbone alone, without Esmeray:

```python
from transformers import AutoTokenizer, {kind}

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
backbone = {kind}.from_pretrained("FOLDER"{settings})
features = backbone(**tokenizer("{example}", return_tensors="pt")).last_hidden_state
"""

_OPEN_MASKED_LM = """from transformers import AutoModelForMaskedLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
network = AutoModelForMaskedLM.from_pretrained("FOLDER")
logits = network(**tokenizer("{example}", return_tensors="pt")).logits
"""

_EXAMPLE = "MKTAYIAKQR"


def model_card(model: TaskModel, facts: Mapping[str, Any], *, spaced: bool = False) -> str:
    """README.md of the exported folder.

    Args:
        model: what is exported.
        facts: further lines of the card by name; a mapping (such as ``metrics``) becomes a table.
        spaced: the tokenizer wants blanks between residues.
    """
    is_autoencoder = isinstance(model, ESM2Autoencoder)
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="feature-extraction" if is_autoencoder else "fill-mask",
        tags=[
            "protein",
            _family(model).lower().replace("-", ""),
            "esmeray",
            "autoencoder" if is_autoencoder else "masked-lm",
        ],
    )
    sections = [_description(model), *(card_section(name, value) for name, value in with_versions(facts).items())]
    lines = _OPEN_AUTOENCODER if is_autoencoder else _OPEN_MASKED_LM
    lines = lines.format(
        kind=type(model.backbone.model).__name__,
        settings=", add_pooling_layer=False" if model.backbone.config.model_type == "esm" else "",
        example=" ".join(_EXAMPLE) if spaced else _EXAMPLE,
    )
    sections.append(f"## How to open it\n\n```python\n{lines}```\n")
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n" + "\n".join(sections)))


def _description(model: TaskModel) -> str:
    config = model.backbone.config
    size = f"{config.num_hidden_layers} layers, {config.hidden_size} channels, {config.num_attention_heads} heads"
    if isinstance(model, ESM2Autoencoder):
        return (
            f"# {_family(model)} autoencoder\n\nCompresses the features of each residue from "
            f"{model.backbone.hidden_size} to {model.latent_size} channels ({model.compression_ratio:g} times) and "
            "reconstructs features and residues. "
            f"The backbone is of the type {_family(model)}, with {size}.\n"
        )
    family = _family(model)
    return f"# {family} masked language model\n\nA {family} with {size}, which predicts hidden residues of proteins.\n"


def _family(model: TaskModel) -> str:
    """Name of the backbone's architecture."""
    kind = str(model.backbone.config.model_type)
    return "ESM-2" if kind == "esm" else kind


def with_versions(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts and, last, the versions of the libraries."""
    return {
        **facts,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, **facts.get("versions", {})},
    }


def card_section(name: str, value: Any) -> str:
    """A heading and a text, or a table of what a mapping holds."""
    title = f"## {name.replace('_', ' ').capitalize()}\n\n"
    if not isinstance(value, Mapping):
        return f"{title}{value}\n"
    rows = "\n".join(f"| {_cell(key)} | {_cell(entry)} |" for key, entry in value.items())
    return f"{title}| | |\n|---|---|\n{rows}\n"


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
