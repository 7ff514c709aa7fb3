"""Memory of a model's state on each device, without allocating any of it.

Rajbhandari et al. 2020 (ZeRO), section 3.1 and figure 1: with mixed precision and Adam, 2 bytes a parameter for
weights, 2 for gradients and 12 for the optimizer (in fp32 4, 4 and 8); ZeRO-1 divides the optimizer state over the
devices, ZeRO-2 the gradients too, ZeRO-3 the weights too. Muon keeps no second moment, 4 bytes fewer. Activations,
buckets and the allocator's slack come on top. Here gradients are added up in fp32 from ZeRO-1 on (grad_accum_dtype in
the shipped settings): 4 bytes.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from esmeray.model.task_model import TaskModel

_FP32_BYTES = 4
KEPT_VECTORS: dict[bool | str, float] = {False: 16.0, "selective": 10.0, True: 1.0}
"""Vectors of hidden_size channels that a token leaves in a layer of ESM-2 for the backward pass, by
``gradient_checkpointing``."""


class ParameterCount(NamedTuple):
    """Parameters of a model, those that the optimizer moves, and those of them in matrices of the backbone's layers."""

    total: int
    trainable: int
    matrices: int


class MemoryEstimate(NamedTuple):
    """Parameters of a run, and bytes of its model's state on each device.

    ``optimizer_bytes`` are 0 if it is offloaded; each worker then keeps ``host_optimizer_bytes`` in host memory.
    """

    parameters: ParameterCount
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_optimizer_bytes: int


def count_parameters(model: "TaskModel") -> ParameterCount:
    """Count the parameters of a model, which may be one without memory for them."""
    from esmeray.model.parameter_groups import layer_matrices  # here: it imports torch

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
    """Bytes of weights, gradients and optimizer state under ZeRO of a stage from 0 to 3."""
    total, trainable, matrices = count
    mixed = precision != "fp32"
    element_bytes = 2 if mixed else 4
    moments = 2 * trainable - (matrices if optimizer == "muon" else 0)
    # In mixed precision the optimizer has its own fp32 copy of the weights, from which the bf16 ones are rounded.
    state_bytes = _FP32_BYTES * (moments + (mixed + weight_mean) * trainable)

    def share(size_bytes: int, from_stage: int) -> int:
        return -(-size_bytes // world_size) if stage >= from_stage else size_bytes

    optimizer_bytes = share(state_bytes, 1)
    return MemoryEstimate(
        parameters=count,
        parameter_bytes=share(element_bytes * total, 3),
        # Without ZeRO the wrapper keeps gradients in the weights' own dtype.
        gradient_bytes=share((_FP32_BYTES if stage else element_bytes) * trainable, 2),
        optimizer_bytes=0 if offload_optimizer else optimizer_bytes,
        host_optimizer_bytes=optimizer_bytes if offload_optimizer else 0,
    )


def activation_bytes_per_token(layers: int, hidden_size: int, precision: str, checkpointing: bool | str) -> float:
    """Bytes that a token of a micro-batch keeps until its backward pass; of a layer computed again, all."""
    recomputed = KEPT_VECTORS[False] - KEPT_VECTORS[checkpointing]
    return (2 if precision != "fp32" else 4) * hidden_size * (layers * KEPT_VECTORS[checkpointing] + recomputed)
