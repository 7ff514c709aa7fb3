"""Interface of a task to the training loop: a module that takes a packed batch and returns loss and metrics as sums.

All return values are additive over batches and workers; :meth:`TaskModel.metrics` turns the sums into the reported
values. A mean over the global batch, or over a whole evaluation, is therefore the same for any number of workers, to
about 1e-6: within a batch, sums are fp32 over channels and fp64 over tokens; across batches they are fp64.

Shape legend: T tokens in the batch, M targets (tokens, or for the classifier sequences).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from esmeray.common.errors import DataError, parsing
from esmeray.common.publishing import verified
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.model.backbones.base import PackedBackbone

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TaskOutput:
    """Loss and metrics of one packed batch.

    Attributes:
        loss_sum: () fp32, the weighted loss summed over the M targets; 0 with zero gradients if there are none.
        num_targets: () int64, the number of targets M.
        metrics: detached fp64 sums, each () or one-dimensional, additive over batches and workers.
    """

    loss_sum: Tensor
    num_targets: Tensor
    metrics: dict[str, Tensor]


class TaskModel(nn.Module, ABC):
    """Base class of the models of tasks.

    A batch without any target (a filler) gives a zero loss whose backward pass gives every trainable parameter a zero
    gradient. Every worker thus takes part in every reduction.

    Attributes:
        backbone: None if the model takes vectors as input.
        saved_apart: name prefixes of weights that are not part of :meth:`own_state`.
    """

    task: ClassVar[str]
    saved_apart: ClassVar[tuple[str, ...]] = ("backbone.",)
    # Without a value, because a class attribute would hide the module of that name.
    backbone: PackedBackbone | None

    @property
    def layers(self) -> nn.Module:
        """Layers of the backbone; an empty list if there is no backbone."""
        return nn.ModuleList() if self.backbone is None else self.backbone.layers

    @abstractmethod
    def forward(self, batch: PackedBatch) -> TaskOutput:
        """Return loss and metric sums of one batch."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the reported metrics from sums over batches and workers; empty if there was no target."""

    def own_state(self) -> dict[str, Tensor]:
        """Weights that are saved in addition to the network, by name."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith(self.saved_apart)}

    def save_own_weights(self, path: Path) -> None:
        # safetensors does not accept views.
        save_file({name: t.contiguous() for name, t in self.own_state().items()}, path, metadata={"format": "pt"})

    def load_own_weights(self, path: Path) -> Self:
        """Load the file of :meth:`save_own_weights` and return the model.

        Raises DataError if it is damaged or from another model.
        """
        with parsing(path, "export the model again", SafetensorError):
            state = load_file(verified(path))
        own_shapes = {name: tensor.shape for name, tensor in self.own_state().items()}
        # Compare names and shapes first. Loading needs strict=False, because the backbone is missing in the file, and
        # would ignore any difference.
        if {name: tensor.shape for name, tensor in state.items()} != own_shapes:
            raise DataError(f"{path} does not match the settings in its folder; export the model again")
        self.load_state_dict(state, strict=False)
        return self


class Card(NamedTuple):
    """Content of a model card.

    Attributes:
        pipeline_tag: pipeline of transformers that returns the model's own outputs, if there is one.
        tags: tags for the hub.
        description: Markdown that describes the model.
        opening: Markdown that explains how to open it.
    """

    pipeline_tag: str | None
    tags: tuple[str, ...]
    description: str
    opening: str


class ResidueModel(TaskModel):
    """Base class of tasks on residues, which are exported as a network of transformers with additional files."""

    backbone: PackedBackbone

    def network(self) -> "PreTrainedModel":
        """Return a model of transformers that shares the parameters, for saving; by default, the backbone's."""
        from esmeray.model.backbones.huggingface_loading import transformers_network  # here: it takes seconds

        return transformers_network(self.backbone.model)

    @abstractmethod
    def card(self, family: str, size: str, network_code: Callable[[str, str], str]) -> Card:
        """Return the content of the model card. FOLDER stands for the folder; ``family`` and ``size`` name the network.

        ``network_code`` takes a name for the output and the output's attribute, and returns a block of code that opens
        the network only.
        """

    def save(self, folder: Path) -> None:
        """Write the model's additional weights and settings to ``folder``."""


class StepModel(TaskModel):
    """Base class of tasks whose loss depends on all sequences of a step, over its batches and all workers.

    Vectors of all sequences are computed without gradients. Each batch then passes through the model as usual, with the
    additional data from :meth:`related`.
    """

    @abstractmethod
    def vectors(self, batch: PackedBatch) -> Tensor:
        """Return (N, D) fp32 vectors on which the loss depends."""

    @abstractmethod
    def related(
        self, batches: Sequence[PackedBatch], vectors: Sequence[Tensor], gather: Callable[[Any], list[Any]], rank: int
    ) -> list[PackedBatch]:
        """Return this worker's batches with the data of the whole step that their forward passes need.

        ``gather`` takes a value in host memory and returns the values of all workers, by rank. Every worker calls it.
        """


def scalar_sums(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the summed scalars as Python floats, in one transfer from the device."""
    # Stacked, because each .item() would be a CPU-GPU sync point.
    scalars = {name: value for name, value in sums.items() if value.ndim == 0}
    values = torch.stack([value.double() for value in scalars.values()]).tolist()
    return dict(zip(scalars, values, strict=True))
