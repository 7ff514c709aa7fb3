"""How much memory a model's state needs on each device, without allocating any of it.

Formulas: Rajbhandari et al. 2020 (ZeRO), section 3.1 and figure 1: with mixed precision and Adam, 2 bytes a parameter
for weights, 2 for gradients and 12 for the optimizer (fp32 weights, momentum, variance); ZeRO-1 divides the optimizer
state over the devices, ZeRO-2 the gradients too, ZeRO-3 the weights too. In fp32 weights and gradients take 4 bytes and
the optimizer 8. Activations, buckets and the allocator's slack come on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from train_config.schema import ModelSection

if TYPE_CHECKING:
    from torch import nn

    from dataset.label_space import LabelSpace
    from dataset.tokenizers import SequenceTokenizer

_ADAM_MOMENT_BYTES = 8
_MASTER_WEIGHT_BYTES = 4


class ParameterCount(NamedTuple):
    """Parameters of a model, and those that the optimizer moves."""

    total: int
    trainable: int

    @classmethod
    def of(cls, model: nn.Module) -> ParameterCount:
        """Those of a model, which may be on the meta device."""
        parameters = list(model.parameters())
        return cls(sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad))


@dataclass(frozen=True)
class MemoryEstimate:
    """Model state of a run.

    Attributes:
        parameters: of the whole model.
        trainable_parameters: of these, those that the optimizer moves.
        parameter_bytes: weights on each device.
        gradient_bytes: gradients on each device.
        optimizer_bytes: optimizer state on each device; 0 if it is offloaded.
        host_optimizer_bytes: offloaded optimizer state that each worker keeps in host memory.
    """

    parameters: int
    trainable_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_optimizer_bytes: int

    @property
    def device_bytes(self) -> int:
        """All model state on each device."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def count_parameters(section: ModelSection) -> ParameterCount:
    """Parameters of a task on residues, counted on the meta device: 15 billion take a fraction of a second.

    Raises:
        ConfigError: the backbone's source or size is wrong.
        ResourceError: its config is on the hub, which can't be reached.
    """
    import torch
    from transformers import EsmForMaskedLM  # here: it takes seconds, and a refusal comes before anything is counted

    from model.esm2 import read_config
    from model.registry import assemble

    config = read_config(section.backbone)
    with torch.device("meta"):
        model = assemble(section, EsmForMaskedLM(config), seed=0)
    return ParameterCount.of(model)


def count_classifier_parameters(
    section: ModelSection, label_space: LabelSpace, tokenizer: SequenceTokenizer
) -> ParameterCount:
    """Parameters of a classifier, counted on the meta device.

    Raises:
        ConfigError: the backbone's source or size is wrong, or the head or adapter does not go with it.
        ResourceError: its config is on the hub, which can't be reached.
    """
    import torch

    from model.backbones import empty_backbone
    from model.registry import assemble_classifier

    backbone = empty_backbone(section.backbone, tokenizer.vocabulary_size, tokenizer.pad)
    with torch.device("meta"):
        return ParameterCount.of(assemble_classifier(section, backbone, label_space, tokenizer))


def estimate_memory(
    count: ParameterCount, *, stage: int, world_size: int, amp_dtype: str, offload_optimizer: bool = False
) -> MemoryEstimate:
    """Bytes of weights, gradients and optimizer state under ZeRO.

    Args:
        count: of the model.
        stage: ZeRO stage, 0 to 3.
        world_size: devices that the state is divided over.
        amp_dtype: ``bf16``, ``fp16`` or ``none``, as in the training section.
        offload_optimizer: optimizer state in host memory.
    """
    total, trainable = count
    mixed = amp_dtype != "none"
    element_bytes = 2 if mixed else 4
    optimizer_element_bytes = _ADAM_MOMENT_BYTES + (_MASTER_WEIGHT_BYTES if mixed else 0)

    def share(size_bytes: int, from_stage: int) -> int:
        return -(-size_bytes // world_size) if stage >= from_stage else size_bytes

    optimizer_bytes = share(optimizer_element_bytes * trainable, 1)
    return MemoryEstimate(
        parameters=total,
        trainable_parameters=trainable,
        parameter_bytes=share(element_bytes * total, 3),
        gradient_bytes=share(element_bytes * trainable, 2),
        optimizer_bytes=0 if offload_optimizer else optimizer_bytes,
        host_optimizer_bytes=optimizer_bytes if offload_optimizer else 0,
    )
