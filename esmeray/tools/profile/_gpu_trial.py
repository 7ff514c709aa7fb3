"""Two training steps of a tiny ESM-2 masked language model with the engine that training uses.

The steps pass if the first loss agrees with fp32 on the CPU for the same weights, all losses and gradient norms are
finite, and the update lowers the loss.
"""

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist

from esmeray.cluster.collective import join_alone
from esmeray.common.errors import ResourceError
from esmeray.dataset.packed_batch import TARGETS, PackedBatch
from esmeray.dataset.targets import IGNORED_TARGET
from esmeray.dataset.tokens.esm import CLS, EOS, MASK, pack_sequences
from esmeray.model.section import BackboneSection
from esmeray.tasks.masked_lm.model import MaskedLM
from esmeray.tasks.section import ModelSection
from esmeray.training.engine.engine import TrainingEngine, apply_device_settings
from esmeray.training.section import DeepSpeedSection, TrainingSection

Precision = Literal["bf16", "fp16", "fp32"]

_STEPS = 2
_MAX_ATTEMPTS = 20
"""Maximum number of steps, including steps that fp16 skips until its loss scale, halved from 2^16, is low enough."""
_LEARNING_RATE = 1e-3
_TOLERANCE = 0.02
"""Relative tolerance of the first loss: bf16 has 8 bits of precision, with a rounding error of 0.4 %."""
_MODEL = ModelSection(
    task="masked_lm", backbone=BackboneSection(source="esm2_t6_8M", layers=2, hidden_size=64, heads=4)
)
_SEQUENCES = ("MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQ", "GAVLIPFWMSTNQDEHKRC" * 3)


def precisions(device: torch.device) -> tuple[Precision, ...]:
    """Return bf16 and fp16 for a GPU, bf16 and fp32 for the CPU, for which DeepSpeed has no fp16."""
    return ("bf16", "fp16") if device.type == "cuda" else ("bf16", "fp32")


def train_two_steps(precision: Precision, device: torch.device) -> str:
    """Train within :func:`single_process_group` and return the losses as text.

    Raises ResourceError if a step did not train, and RuntimeError from torch, DeepSpeed or CUDA.
    """
    training = TrainingSection(precision=precision, learning_rate=_LEARNING_RATE, compile=False)
    apply_device_settings()
    model = MaskedLM.build(_MODEL, seed=0)
    batch = _masked_batch()
    # Computed before the engine moves and casts the model.
    with torch.no_grad():
        output = model(batch)
    targets = int(output.num_targets)
    reference = float(output.loss_sum) / targets
    losses, norms = [], []
    with closing(TrainingEngine(model, training, DeepSpeedSection(stage=2), device)) as engine:
        for _ in range(_MAX_ATTEMPTS):  # the same batch each time, so that the loss has to fall
            output = engine(batch.to(device))
            engine.backward(output.loss_sum, targets)
            norm = float(engine.step(_LEARNING_RATE).gradient_norm)
            # In fp16 gradients overflow until the loss scale is low enough. In other precisions that is an error.
            if math.isfinite(norm) or precision != "fp16":
                losses.append(float(output.loss_sum.detach()) / targets)
                norms.append(norm)
            if len(losses) == _STEPS:
                break
        else:
            raise ResourceError(f"{_MAX_ATTEMPTS - len(losses)} steps had non-finite gradients")
    if not all(map(math.isfinite, [*losses, *norms])):
        raise ResourceError(f"some losses {losses} or gradient norms {norms} are not finite")
    if abs(losses[0] - reference) > _TOLERANCE * reference:
        raise ResourceError(f"the loss is {losses[0]:.4f}, but {reference:.4f} in fp32 on the CPU")
    if losses[-1] >= losses[0]:
        raise ResourceError(f"the update did not lower the loss ({losses[0]:.4f} to {losses[-1]:.4f})")
    return f"loss {' to '.join(f'{loss:.4f}' for loss in losses)}, fp32 on the CPU {reference:.4f}"


def _masked_batch() -> PackedBatch:
    batch = pack_sequences(_SEQUENCES)
    # Mask every seventh residue: about 15 %, as in training, and deterministic.
    masked = (batch.tokens != CLS) & (batch.tokens != EOS) & (batch.positions % 7 == 0)
    targets = torch.where(masked, batch.tokens, IGNORED_TARGET)
    return replace(batch, tokens=torch.where(masked, MASK, batch.tokens), by_token={TARGETS: targets})


@contextmanager
def single_process_group(device: torch.device) -> Iterator[None]:
    """Join a process group of this process only, which DeepSpeed needs, unless there is a group already."""
    if dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL uses the current device
    join_alone("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
