"""Replacements in ZeRO's stages 1 and 2 of DeepSpeed 0.19.8, so that no step waits for the device.

DeepSpeed reads the gradients' norm and whether they are finite on the host, three times a step. Here AdamW's kernel
clips and leaves an update out by itself, and one worker's gradients go through no bucket.
"""

from typing import Any

import torch
from torch import Tensor, nn

WEIGHT_MEAN = "weight_mean"
"""Key of the optimizer's state of a parameter: the exponential mean of its weights."""
INITIAL_MICRO_STEP = -1
"""DeepSpeed's ``INITIAL_MICRO_STEP_ID``."""


class ClippingAdamW(torch.optim.AdamW):
    """AdamW whose kernel clips, and leaves an update with a NaN or infinite gradient out: no host waits to decide it.

    Without DeepSpeed's optimizer around it (stage 0 in fp32) it takes the norm itself; ``max_norm`` is the largest
    global norm, 0 for any. ``mean_decay``: decay rate of a mean of the weights; None for no mean.
    """

    max_norm: float | None = None
    mean_decay: float | None = None
    norm: Tensor | None = None

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Have the next steps divide by norm / max_norm where that is above 1, and do nothing for a norm not finite."""
        # The names that torch's gradient scaler sets on fused optimizers.
        self.found_inf = (~norm.isfinite()).float()
        # As torch.nn.utils.clip_grad_norm_ does it, 1e-6 included; never to make gradients larger.
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
        """Update the parameters, once it is known how to clip."""
        super().step()

    def _average(self, most_decay: float) -> None:
        """Move the mean towards the weights; early in a run it forgets fast, as what it began with is random."""
        for parameter in [parameter for group in self.param_groups for parameter in group["params"]]:
            if state := self.state[parameter]:
                if WEIGHT_MEAN not in state:
                    state[WEIGHT_MEAN] = parameter.detach().clone()
                # TensorFlow's rule for num_updates (tf.train.ExponentialMovingAverage).
                decay = ((1 + state["step"]) / (10 + state["step"])).clamp(max=most_decay)
                state[WEIGHT_MEAN].lerp_(parameter, 1 - decay)


def clip_on_device(zero: Any, optimizer: ClippingAdamW, max_norm: float) -> None:
    """Replace what in a step of ZeRO stages 1 and 2 of DeepSpeed 0.19.8 waits for the device, three times, to clip."""
    from deepspeed import comm

    def norm() -> Tensor:
        squares = torch.zeros((), device=zero.device)
        # This worker's parts; together they are all gradients once.
        for gradients in zero.averaged_gradients.values():
            if gradients:  # a group of few parameters leaves some workers none
                squares += torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).square().sum()
        if comm.get_world_size(zero.dp_process_group) > 1:
            comm.all_reduce(squares, group=zero.dp_process_group)
        return squares.sqrt()

    # The norm says the same without another look at each gradient.
    zero.check_grad_overflow = False
    zero.scaled_global_norm = norm
    zero.unscale_and_clip_grads = lambda gradients, norm: optimizer.clip(norm, max_norm)


def add_up_in_place(zero: Any) -> None:
    """Have one worker's ZeRO-2 in bf16 add each gradient to its fp32 sum, with no bucket to send between.

    In DeepSpeed 0.19.8 a gradient goes through a bucket, a division and a reduction, which wait for the device.
    """
    if not all(zero._use_compact_grad_partition_buffer(group) for group in range(len(zero.bit16_groups))):
        return

    def add_up(parameter: Any, group: int) -> None:
        total = zero._get_compact_grad_partition_slice(group, 0, zero.get_param_id(parameter), parameter.numel())
        # In fp32: in bf16 the sum of many micro-batches would lose the small ones.
        total.add_(parameter.grad.flatten())
        parameter.grad = None

    zero.process_gradients = add_up
    zero.reduce_ipg_grads = lambda comm_dtype=None: None
    zero.overlap_comm = False


def clear_partitioned_gradients(optimizer: Any) -> None:
    """Clear what ZeRO stages 1 and 2 of DeepSpeed 0.19.8 keep from a backward pass until its end or until the step."""
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
