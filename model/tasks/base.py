"""Interface of a task to the training loop: a module that takes a packed batch and gives loss and metrics as sums.

Everything a task returns adds up over batches and workers; :meth:`TaskModel.metrics` turns the sums into the values
that a person reads. So a mean over the global batch, or over a whole evaluation, is the same for any number of
workers, to the rounding of the sums: within a batch they are taken in fp32 over channels and in fp64 over tokens, and
across batches in fp64. Metrics agree to about 1e-6 relative.

Shape legend: T tokens in the batch, M targets (tokens, or for the classifier sequences).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.errors import DataError
from dataset.packed_batch import PackedBatch
from model.backbones.base import PackedBackbone

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class TaskOutput:
    """Loss and metrics of one packed batch.

    Attributes:
        loss_sum: () fp32, the weighted loss summed over the M targets; 0 with zero gradients if there are none.
        num_targets: () int64, M.
        metrics: detached fp64 sums, each () or one-dimensional, additive over batches and workers.
    """

    loss_sum: Tensor
    num_targets: Tensor
    metrics: dict[str, Tensor]


class TaskModel(nn.Module, ABC):
    """Base of the tasks.

    Calling it with a batch that has no target at all (a filler) gives a zero loss whose backward reaches every
    trainable parameter with a zero gradient, so that every worker takes part in every reduction.

    Attributes:
        task: its name in ``model.task``.
    """

    task: ClassVar[str]
    backbone: PackedBackbone

    @abstractmethod
    def forward(self, batch: PackedBatch) -> TaskOutput:
        """Loss and metric sums of one batch; its targets are those of the task (:class:`PackedBatch`)."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the reported metrics from their sums over batches and workers; none if there was no target."""


class Card(NamedTuple):
    """The text of a model card: tag of the hub, more tags, and Markdown of what the model is and of how to open it."""

    pipeline_tag: str
    tags: tuple[str, ...]
    description: str
    opening: str


class ResidueModel(TaskModel):
    """Base of the tasks on residues: each is exported as a network of transformers, with files of its own beside it."""

    @abstractmethod
    def network(self) -> PreTrainedModel:
        """The model of transformers that holds the same parameters, to be saved; nothing is copied."""

    @abstractmethod
    def card(self, family: str, size: str, network_code: Callable[[str, str], str]) -> Card:
        """The card's text.

        ``family`` and ``size`` name the network. ``network_code`` makes the block of code that opens it alone, with a
        name for its output and the attribute that this is. The folder is called FOLDER.
        """

    def save(self, folder: Path) -> None:
        """Write what the model learns beside the network to ``folder``."""


def save_own_weights(state: dict[str, Tensor], path: Path) -> None:
    """Write what a task learns beside the backbone as safetensors."""
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"})


def load_own_weights(model: TaskModel, expected: dict[str, Tensor], path: Path) -> None:
    """Load what :func:`save_own_weights` wrote, which must have the names and shapes of ``expected``.

    Raises DataError (the file is damaged, or of another model).
    """
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} can't be read ({error}); export the model again") from error
    if {name: tensor.shape for name, tensor in state.items()} != {name: t.shape for name, t in expected.items()}:
        raise DataError(f"{path} does not fit the settings beside it; export the model again")
    model.load_state_dict(state, strict=False)


def read_own_settings(path: Path, version: int, holds: str, parse: Callable[[dict[str, Any]], Settings]) -> Settings:
    """What ``parse`` makes of the settings that a task wrote beside its weights.

    Raises DataError (the folder does not hold what it should, ``holds``; another format version; damaged).
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if settings["format_version"] != version:
            found = settings["format_version"]
            raise DataError(f"{path} has format version {found}, this program reads {version}; export the model again")
        return parse(settings)
    except FileNotFoundError as error:
        raise DataError(f"{path.parent} holds no {holds} ({path.name} is missing)") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}); export the model again") from error


def scalar_sums(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """The summed scalars as Python floats, in one transfer from the device."""
    scalars = {name: value for name, value in sums.items() if value.ndim == 0}
    values = torch.stack([value.double() for value in scalars.values()]).tolist()
    return dict(zip(scalars, values, strict=True))
