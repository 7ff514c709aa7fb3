"""Interface of a task to the training loop: a module that takes a packed batch and gives loss and metrics as sums.

Everything a task returns adds up over batches and workers; :meth:`TaskModel.metrics` turns the sums into the values
that a person reads. So a mean over the global batch, or over a whole evaluation, is the same for any number of workers,
to about 1e-6: within a batch sums are fp32 over channels and fp64 over tokens, and across batches fp64.

Shape legend: T tokens in the batch, M targets (tokens, or for the classifier sequences).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from esmeray.common.errors import DataError, parsing
from esmeray.common.verification import verified
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.model.backbones.base import PackedBackbone

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TaskOutput:
    """Loss and metrics of one packed batch.

    Attributes:
        loss_sum: () fp32, the weighted loss summed over the M targets; 0 with zero gradients if there are none.
        num_targets: () int64.
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
        not_served: why the service refuses such a model, with the command to use it by, where SOURCE is its name.
        backbone: None where the model takes vectors.
        saved_apart: beginnings of the names of weights that are no part of :meth:`own_state`.
    """

    task: ClassVar[str]
    not_served: ClassVar[str] = ""
    saved_apart: ClassVar[tuple[str, ...]] = ("backbone.",)
    # Without a value: an attribute of the class would hide the module of that name.
    backbone: PackedBackbone | None

    @property
    def layers(self) -> nn.Module:
        """The backbone's layers; of a model on vectors, which has none, an empty list of them."""
        return nn.ModuleList() if self.backbone is None else self.backbone.layers

    @abstractmethod
    def forward(self, batch: PackedBatch) -> TaskOutput:
        """Loss and metric sums of one batch."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the reported metrics from their sums over batches and workers; none if there was no target."""

    def own_state(self) -> dict[str, Tensor]:
        """Weights learnt beside the network, by name."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith(self.saved_apart)}

    def save_own_weights(self, path: Path) -> None:
        # safetensors takes no views.
        save_file({name: t.contiguous() for name, t in self.own_state().items()}, path, metadata={"format": "pt"})

    def load_own_weights(self, path: Path) -> None:
        """Load what :meth:`save_own_weights` wrote. Raises DataError (the file is damaged, or of another model)."""
        with parsing(path, "export the model again", SafetensorError):
            state = load_file(verified(path))
        own_shapes = {name: tensor.shape for name, tensor in self.own_state().items()}
        # Held against the model before it is loaded: strict=False, for want of the backbone, would pass over anything.
        if {name: tensor.shape for name, tensor in state.items()} != own_shapes:
            raise DataError(f"{path} does not fit the settings beside it; export the model again")
        self.load_state_dict(state, strict=False)


class Card(NamedTuple):
    """The text of a model card: the pipeline of transformers with the model's own outputs, if there is one; tags of the
    hub; and Markdown of what the model is and of how to open it."""

    pipeline_tag: str | None
    tags: tuple[str, ...]
    description: str
    opening: str


class ResidueModel(TaskModel):
    """Base of the tasks on residues: each is exported as a network of transformers, with files of its own beside it."""

    backbone: PackedBackbone

    @abstractmethod
    def network(self) -> "PreTrainedModel":
        """The model of transformers that holds the same parameters, to be saved; nothing is copied."""

    @abstractmethod
    def card(self, family: str, size: str, network_code: Callable[[str, str], str]) -> Card:
        """The card's text, in which the folder is called FOLDER; ``family`` and ``size`` name the network.

        ``network_code`` makes the block of code that opens it alone, of a name for its output and its attribute.
        """

    def save(self, folder: Path) -> None:
        """Write what the model learns beside the network to ``folder``."""


class StepModel(TaskModel):
    """Base of the tasks whose loss is one of all sequences of a step, over its batches and all workers.

    The vectors of all are computed without gradients; then each batch passes as any other does, with what
    :meth:`related` gave it.
    """

    @abstractmethod
    def vectors(self, batch: PackedBatch) -> Tensor:
        """(N, D) fp32: what the loss is of."""

    @abstractmethod
    def related(
        self, batches: Sequence[PackedBatch], vectors: Sequence[Tensor], gather: Callable[[Any], list[Any]], rank: int
    ) -> list[PackedBatch]:
        """The batches of this worker with what their forward passes have to know of the step.

        ``gather``: from a value in host memory to those of all workers, by rank. Every worker calls it.
        """


def scalar_sums(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """The summed scalars as Python floats, in one transfer from the device."""
    # Stacked first: .item() of each would be a CPU-GPU sync point of its own.
    scalars = {name: value for name, value in sums.items() if value.ndim == 0}
    values = torch.stack([value.double() for value in scalars.values()]).tolist()
    return dict(zip(scalars, values, strict=True))
