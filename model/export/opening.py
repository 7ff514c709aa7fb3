"""Models as they are opened from files: by transformers alone, or by the task that exported them.

In: a folder, a hub name or a size. Out: backbone, tokenizer and heads, in fp32 on the CPU. A new task adds a line to
``OPENERS``.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from esmeray.common.errors import DataError
from esmeray.dataset.tokens.base import EsmSequenceTokenizer, SequenceTokenizer
from esmeray.installation import added
from esmeray.model.backbones.architectures import MASKED_LM_HEADS, PACKED
from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.backbones.loading import build_backbone, build_masked_lm, residue_tokenizer
from esmeray.model.backbones.source import source_type
from esmeray.model.export.classifier import load_classifier
from esmeray.model.tasks.autoencoder import ESM2Autoencoder
from esmeray.model.tasks.base import TaskModel
from esmeray.model.tasks.diffusion import open_diffusion
from esmeray.train_config.schema import BackboneSection


class Opened(NamedTuple):
    """``heads`` has what computes from the backbone's features, by the name of its task."""

    backbone: PackedBackbone
    tokenizer: SequenceTokenizer
    heads: Mapping[str, Any]


def _refuse_sequences(folder: Path) -> tuple[TaskModel, SequenceTokenizer]:
    raise DataError(f"{folder}: a network on vectors gives no outputs of sequences; see 'esmeray function predict'")


OPENERS: dict[str, Callable[[Path], tuple[TaskModel, SequenceTokenizer]] | None] = {
    "autoencoder": lambda folder: (ESM2Autoencoder.from_pretrained(folder), EsmSequenceTokenizer()),
    "classifier": load_classifier,
    "diffusion": lambda folder: (open_diffusion(folder), EsmSequenceTokenizer()),
    "masked_lm": None,
    "terms": _refuse_sequences,
}
"""How an export of each task is opened, in fp32 on the CPU; None where transformers alone opens it."""
OPENERS |= added("openers")


def open_exported(task: str, folder: Path) -> Opened:
    """The model that ``task`` exported to ``folder``. Raises DataError for a damaged export or an unknown task."""
    if task not in OPENERS:
        raise DataError(f"{folder}: a model of task {task}, which gives no outputs of sequences; choose another model")
    opener = OPENERS[task]
    if opener is None:
        return open_network(str(folder), with_head=True)
    model, tokenizer = opener(folder)
    heads: dict[str, Any] = {task: model}
    if (head := getattr(model, "lm_head", None)) is not None:
        heads["masked_lm"] = head
    return Opened(model.backbone, tokenizer, heads)


def open_network(source: str, *, with_head: bool) -> Opened:
    """A folder, hub name or size of transformers, with the head of its masked language model where it has one.

    Raises ConfigError, DataError and ResourceError as :func:`esmeray.model.backbones.loading.build_backbone` does.
    """
    section = BackboneSection(source=source, frozen=True)
    kind = source_type(section)
    section = section.model_copy(update={"padded": kind != "esm" and kind not in PACKED})
    tokenizer = residue_tokenizer(section)
    vocabulary = tokenizer.vocabulary_size, tokenizer.pad
    if with_head and kind in MASKED_LM_HEADS:
        backbone, head = build_masked_lm(section, 0, *vocabulary)
        return Opened(backbone, tokenizer, {"masked_lm": head})
    return Opened(build_backbone(section, 0, *vocabulary), tokenizer, {})
