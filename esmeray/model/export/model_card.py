"""Model card of an export: its purpose, its training data and metrics, and code that opens it."""

import inspect
import math
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from esmeray.dataset.tokens.base import SequenceTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_card(
    pipeline_tag: str | None, tags: list[str], description: str, facts: Mapping[str, Any], opening: str
) -> str:
    """Return README.md of the exported folder.

    Args:
        pipeline_tag: pipeline of transformers that returns the model's own outputs, None if there is none.
        tags: tags for the hub, in addition to Esmeray's.
        description: Markdown that describes the model.
        facts: further sections by name; a mapping (such as ``metrics``) becomes a table. The license, a base model of
            the hub and the metrics also become metadata. Versions of the libraries are added.
        opening: text and code of the section on how to open the folder, which is called FOLDER there.
    """
    base = str(facts.get("base_model", ""))
    metadata = ModelCardData(
        library_name="transformers",
        license=facts.get("license", "unknown"),
        base_model=base if "/" in base else None,
        pipeline_tag=pipeline_tag,
        tags=["esmeray", *tags],
        model_name=str(facts.get("run", "model")),
        eval_results=_evaluations(pipeline_tag or tags[-1], facts),
    )
    versions = {"torch": torch.__version__, "transformers": version("transformers"), **facts.get("versions", {})}
    sections = [_section(name, value) for name, value in {**facts, "versions": versions}.items()]
    parts = [f"---\n{metadata.to_yaml()}\n---\n\n{description}", *sections, f"## How to open it\n\n{opening}"]
    return str(ModelCard("\n".join(parts)))


def _evaluations(task: str, facts: Mapping[str, Any]) -> list[EvalResult] | None:
    """Validation metrics in the format of the hub's ``model-index``."""
    data = str(facts.get("data", "unknown"))
    return [
        EvalResult(
            task, dataset_type=data, dataset_name=data, dataset_split="validation", metric_type=name, metric_value=value
        )
        for name, value in (facts.get("metrics") or {}).items()
        if isinstance(value, float | int) and math.isfinite(value)
    ] or None


def python_block(lines: str) -> str:
    return f"```python\n{lines}```\n"


def opening_call(network: "PreTrainedModel", source: str) -> tuple[str, str]:
    """Return the class of transformers that opens a network, and the call, without a pooler with random weights.

    ``source``: folder or hub name, as Python source.
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING  # imported here: it takes seconds

    kind = type(network)
    # For some configs, AutoModel opens another class (T5's encoder).
    opener = "AutoModel" if MODEL_MAPPING.get(type(network.config), None) is kind else kind.__name__
    # A missing pooler would be initialized at random, with a warning at each opening.
    takes_pooler = "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    without = ", add_pooling_layer=False" if takes_pooler and getattr(network, "pooler", None) is None else ""
    return opener, f"{opener}.from_pretrained({source}{without})"


def example_text(tokenizer: SequenceTokenizer) -> str:
    """Example input for AutoTokenizer, with spaces between residues if the vocabulary needs them."""
    # A tokenizer of texts would not split a protein into residues.
    text = "MKTAYIAKQR" if tokenizer.one_token_per_residue else "This sentence gets a class."
    return " ".join(text) if getattr(tokenizer, "spaced", False) else text


def _section(name: str, value: Any) -> str:
    title = f"## {name.replace('_', ' ').capitalize()}\n\n"
    if not isinstance(value, Mapping):
        return f"{title}{value}\n"
    rows = "\n".join(f"| {_cell(key)} | {_cell(entry)} |" for key, entry in value.items())
    return f"{title}| | |\n|---|---|\n{rows}\n"


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")  # an unescaped | or a line break would end the cell
