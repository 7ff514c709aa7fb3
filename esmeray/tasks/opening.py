"""Open models from files: by transformers alone, or by the task that exported them.

The source is a folder, a hub name or a size. The result has the backbone, the tokenizer and the heads, in fp32 on the
CPU. The function that opens a task's export is the task's ``opener``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from esmeray.common.errors import DataError, did_you_mean
from esmeray.dataset.tokens.base import EsmSequenceTokenizer, SequenceTokenizer
from esmeray.model import relatives
from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.backbones.loading import build_backbone, build_masked_lm, residue_tokenizer
from esmeray.model.backbones.lora import base_folder, has_adapter, load_adapter
from esmeray.model.backbones.source import (
    MASKED_LM_HEADS,
    PACKED,
    has_random_weights,
    has_safetensors,
    source_type,
    weights_folder,
)
from esmeray.model.section import BackboneSection
from esmeray.tasks.registry import part_named, task_named, task_names
from esmeray.train_config.section import Weights


class Opened(NamedTuple):
    """An opened model. ``heads``: modules that compute outputs from the backbone's features, by task name."""

    backbone: PackedBackbone
    tokenizer: SequenceTokenizer
    heads: Mapping[str, Any]


def can_be_streamed(task: str | None, source: str) -> bool:
    """Test whether the layers can be read on demand: only ESM-2 in transformers' format."""
    section = BackboneSection(source=source)
    is_network = task is None or (task in task_names() and task_named(task).opener is None and not has_adapter(source))
    is_esm2 = is_network and not has_random_weights(section) and source_type(section) == "esm"
    return is_esm2 and has_safetensors(weights_folder(section))


def open_exported(task: str, folder: Path, *, stream: bool = False, weights: Weights = "stored") -> Opened:
    """Open the model that ``task`` exported to ``folder``. Raises DataError for a damaged export or an unknown task."""
    if task == relatives.TASK:  # a fitted encoder, which no task exports
        backbone, fitted = relatives.load_relatives(folder)
        return Opened(backbone, EsmSequenceTokenizer(), {task: fitted})
    if task not in task_names():
        raise DataError(
            f"{folder}: the model's task {task} is not installed{did_you_mean(task, ())}; install its package, "
            "or choose another model"
        )
    opener = task_named(task).opener
    # A plain transformers folder: the model needs no file of Esmeray's.
    if opener is None:
        return open_network(str(folder), with_head=True, stream=stream, weights=weights)
    model, tokenizer = part_named(opener)(folder)
    heads: dict[str, Any] = {task: model}
    # Another task's model can also be a masked language model, e.g. sequence diffusion.
    if (head := getattr(model, "lm_head", None)) is not None:
        heads["masked_lm"] = head
    return Opened(model.backbone, tokenizer, heads)


def open_network(source: str, *, with_head: bool, stream: bool = False, weights: Weights = "stored") -> Opened:
    """Open a transformers folder, hub name or size, with the head of its masked language model if it has one.

    A folder may have a LoRA adapter in place of the network. ``stream``: read the layers on demand. ``weights``: their
    format. Raises ConfigError, DataError and ResourceError
    like :func:`esmeray.model.backbones.loading.build_backbone`.
    """
    # Frozen, since nothing opened here is trained: no activations are kept.
    section = BackboneSection(source=str(base_folder(Path(source))) if has_adapter(source) else source, frozen=True)
    kind = source_type(section)
    # Not a user setting here: architectures without packed attention are padded.
    section = section.model_copy(update={"padded": kind != "esm" and kind not in PACKED})
    tokenizer = residue_tokenizer(section)
    vocabulary = tokenizer.vocabulary_size, tokenizer.pad
    if with_head and kind in MASKED_LM_HEADS:
        backbone, head = build_masked_lm(section, 0, *vocabulary, stream=stream, weights=weights)
        # If the folder lacks the head, the head is random and its output would be noise.
        heads = {} if head.is_drawn else {"masked_lm": head}
    else:
        backbone, heads = build_backbone(section, 0, *vocabulary, stream=stream, weights=weights), {}
    if has_adapter(source):
        load_adapter(backbone, Path(source))
    return Opened(backbone, tokenizer, heads)
