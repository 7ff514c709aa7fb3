"""Replacements for parts of DeepSpeed 0.19.8's ZeRO-1 and 2, so that no step waits for the device.

DeepSpeed reads the gradient norm and its finiteness on the host, three times a step. Here AdamW's kernel clips and
skips updates on the device, and with one worker the gradients go through no bucket.
"""

from typing import Any

import torch
from torch import Tensor, nn

WEIGHT_MEAN = "weight_mean"
"""Key in the optimizer's state of a parameter: the exponential mean of its weights."""
INITIAL_MICRO_STEP = -1
"""DeepSpeed's ``INITIAL_MICRO_STEP_ID``."""


class ClippingAdamW(torch.optim.AdamW):
    """AdamW whose kernel clips gradients and skips updates with NaN or infinite gradients, without a host sync.

    If no DeepSpeed optimizer wraps it (stage 0 in fp32), it computes the norm itself. ``max_norm``: maximum global
    norm, 0 for no clipping; None if the norm is computed elsewhere. ``mean_decay``: decay rate of a mean of the
    weights; None for no mean.
    """

    max_norm: float | None = None
    mean_decay: float | None = None
    norm: Tensor | None = None

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Set the divisor of the next update: norm / max_norm, at least 1. If the norm is not finite, the update is
        skipped."""
        # The attribute names that torch's gradient scaler sets on fused optimizers.
        self.found_inf = (~norm.isfinite()).float()
        # Same rule as torch.nn.utils.clip_grad_norm_, including 1e-6; gradients are never enlarged.
        self.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(norm)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.max_norm is not None:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            self.norm = nn.utils.get_total_norm(gradients).float()
            self.clip(self.norm, self.max_norm)
        self.update()
        if self.mean_decay is not None:
            self._average(self.mean_decay)

    def update(self) -> None:
        """Update the parameters after the clipping factor is set."""
        super().step()

    def _average(self, most_decay: float) -> None:
        """Move the mean towards the weights. Early in a run the decay is faster, since the initial weights are
        random."""
        for parameter in [parameter for group in self.param_groups for parameter in group["params"]]:
            if state := self.state[parameter]:
                if WEIGHT_MEAN not in state:
                    state[WEIGHT_MEAN] = parameter.detach().clone()
                # TensorFlow's rule for num_updates (tf.train.ExponentialMovingAverage).
                decay = ((1 + state["step"]) / (10 + state["step"])).clamp(max=most_decay)
                state[WEIGHT_MEAN].lerp_(parameter, 1 - decay)


def clip_on_device(zero: Any, optimizer: ClippingAdamW, max_norm: float) -> None:
    """Replace the three host syncs of clipping in a ZeRO-1 or 2 step of DeepSpeed 0.19.8."""
    from deepspeed import comm

    def norm() -> Tensor:
        squares = torch.zeros((), device=zero.device)
        # This worker's partitions; over all workers they contain each gradient once.
        for gradients in zero.averaged_gradients.values():
            if gradients:  # a group of few parameters leaves some workers without any
                squares += torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).square().sum()
        if comm.get_world_size(zero.dp_process_group) > 1:
            comm.all_reduce(squares, group=zero.dp_process_group)
        return squares.sqrt()

    # The norm already shows overflow, without another pass over the gradients.
    zero.check_grad_overflow = False
    zero.scaled_global_norm = norm
    zero.unscale_and_clip_grads = lambda gradients, norm: optimizer.clip(norm, max_norm)


def add_up_in_place(zero: Any) -> None:
    """Add gradients directly to their fp32 sum, for ZeRO-2 in bf16 with one worker.

    In DeepSpeed 0.19.8 a gradient goes through a bucket, a division and a reduction, which wait for the device.
    """
    if not all(zero._use_compact_grad_partition_buffer(group) for group in range(len(zero.bit16_groups))):
        return

    def add_up(parameter: Any, group: int) -> None:
        total = zero._get_compact_grad_partition_slice(group, 0, zero.get_param_id(parameter), parameter.numel())
        # Sum in fp32: in bf16 a sum of many micro-batches would lose small gradients.
        total.add_(parameter.grad.flatten())
        parameter.grad = None

    zero.process_gradients = add_up
    zero.reduce_ipg_grads = lambda comm_dtype=None: None
    zero.overlap_comm = False


def clear_partitioned_gradients(optimizer: Any) -> None:
    """Clear the gradient buffers that ZeRO-1 and 2 of DeepSpeed 0.19.8 keep from a backward pass until the step."""
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer._release_ipg_buffers()
    optimizer.extra_large_param_to_reduce.clear()
    optimizer.previous_reduced_grads.clear()
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
    optimizer.reset_partition_gradient_structures()
    for group in optimizer.averaged_gradients:
        optimizer.averaged_gradients[group] = None
    for group in optimizer.all_grad_tensors:
        optimizer.all_grad_tensors[group] = None
    optimizer.micro_step_id = INITIAL_MICRO_STEP
    if optimizer.cpu_offload:
        optimizer._wait_for_offload_copies()
        optimizer._offload_accumulated_param_ids = set()
        optimizer.reset_cpu_buffers()
