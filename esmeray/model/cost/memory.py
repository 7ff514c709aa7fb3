"""Memory of a model's state per device, computed without allocating it.

Rajbhandari et al. 2020 (ZeRO), section 3.1 and figure 1: with mixed precision and Adam, a parameter takes 2 bytes for
the weight, 2 for the gradient and 12 for the optimizer (in fp32 4, 4 and 8). ZeRO-1 partitions the optimizer state over
devices, ZeRO-2 also the gradients, ZeRO-3 also the weights. Muon has no second moment, which saves 4 bytes.
Activations, buckets and the allocator's overhead are additional. From ZeRO-1 on, gradients are accumulated in fp32
(grad_accum_dtype in the included settings) and take 4 bytes.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from esmeray.model.task_model import TaskModel

_FP32_BYTES = 4
KEPT_VECTORS: dict[bool | str, float] = {False: 16.0, "selective": 10.0, True: 1.0}
"""Vectors of hidden_size channels that a token keeps per layer of ESM-2 for the backward pass, by
``gradient_checkpointing``."""


class ParameterCount(NamedTuple):
    """Number of parameters: all, trainable ones, and trainable ones in matrices of the backbone's layers."""

    total: int
    trainable: int
    matrices: int


class MemoryEstimate(NamedTuple):
    """Number of parameters, and bytes of the model's state per device.

    If the optimizer is offloaded, ``optimizer_bytes`` is 0 and each worker keeps ``host_optimizer_bytes`` in host
    memory.
    """

    parameters: ParameterCount
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_optimizer_bytes: int


def count_parameters(model: "TaskModel") -> ParameterCount:
    """Count the parameters of a model, which may be on the meta device."""
    from esmeray.model.parameter_groups import layer_matrices  # imported here: it imports torch

    parameters = list(model.parameters())
    return ParameterCount(
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
        sum(p.numel() for p in layer_matrices(model.layers)),
    )


def estimate_memory(
    count: ParameterCount,
    *,
    stage: int,
    world_size: int,
    precision: str,
    offload_optimizer: bool = False,
    optimizer: str = "adamw",
    weight_mean: bool = False,
) -> MemoryEstimate:
    """Estimate bytes of weights, gradients and optimizer state with ZeRO stage 0 to 3."""
    total, trainable, matrices = count
    mixed = precision != "fp32"
    element_bytes = 2 if mixed else 4
    moments = 2 * trainable - (matrices if optimizer == "muon" else 0)
    # In mixed precision the optimizer has an fp32 copy of the weights, from which the bf16 weights are rounded.
    state_bytes = _FP32_BYTES * (moments + (mixed + weight_mean) * trainable)

    def share(size_bytes: int, from_stage: int) -> int:
        return -(-size_bytes // world_size) if stage >= from_stage else size_bytes

    optimizer_bytes = share(state_bytes, 1)
    return MemoryEstimate(
        parameters=count,
        parameter_bytes=share(element_bytes * total, 3),
        # Without ZeRO, gradients have the dtype of the weights.
        gradient_bytes=share((_FP32_BYTES if stage else element_bytes) * trainable, 2),
        optimizer_bytes=0 if offload_optimizer else optimizer_bytes,
        host_optimizer_bytes=optimizer_bytes if offload_optimizer else 0,
    )


def activation_bytes_per_token(layers: int, hidden_size: int, precision: str, checkpointing: bool | str) -> float:
    """Bytes per token of a micro-batch that are kept for the backward pass, including the layer being recomputed."""
    recomputed = KEPT_VECTORS[False] - KEPT_VECTORS[checkpointing]
    return (2 if precision != "fp32" else 4) * hidden_size * (layers * KEPT_VECTORS[checkpointing] + recomputed)
