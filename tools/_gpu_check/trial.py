"""Two steps of a tiny ESM-2 masked language model through the engine that training uses.

In: a device and a precision. Out: losses, or why it does not work. It works if the first loss is that of the same
weights in fp32 on the CPU, if gradients are finite, and if the update changes the weights and lowers the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from dataset.packed_batch import IGNORED_TARGET, PackedBatch
from dataset.tokens.esm import CLS, EOS, MASK, pack_sequences
from model.parameter_groups import parameter_groups
from model.tasks.registry import build_model
from tools._gpu_check.finding import Finding, first_line, note_if_slow, quiet
from train_config.schema import BackboneSection, DeepSpeedSection, ModelSection, TrainingSection
from training.engine.device import apply_device_settings
from training.engine.engine import TrainingEngine

Precision = Literal["bf16", "fp16", "none"]

STEPS = 2
MOST_ATTEMPTS = 20
"""Steps, with those that fp16 leaves out while its loss scale is still too high (it halves from 2^16)."""
LEARNING_RATE = 1e-3
TOLERANCE = 0.02
"""Of the first loss, relative: bf16 keeps 8 bits, an error of 0.4 % in each rounding."""
MODEL = ModelSection(task="masked_lm", backbone=BackboneSection(source="esm2_t6_8M", layers=2, hidden_size=64, heads=4))
SEQUENCES = ("MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQ", "GAVLIPFWMSTNQDEHKRC" * 3)
MASKED_EVERY = 7


@dataclass(frozen=True)
class Trial:
    """What two steps gave.

    Attributes:
        reference: loss per target of the untrained weights, fp32 on the CPU.
        losses: of each step, before its update.
        norms: gradient norms of the steps.
        skipped: steps that were left out because the loss scale was too high.
        changed: whether the weights did.
    """

    reference: float
    losses: list[float]
    norms: list[float]
    skipped: int
    changed: bool

    def problem(self) -> str:
        """Why this is no training; empty if it is."""
        if len(self.losses) < STEPS:
            return f"{self.skipped} steps in a row had gradients that are not finite"
        if not all(map(math.isfinite, [*self.losses, *self.norms])):
            return f"losses {self.losses} and gradient norms {self.norms} are not all finite"
        if abs(self.losses[0] - self.reference) > TOLERANCE * self.reference:
            return f"the loss is {self.losses[0]:.4f}, in fp32 on the CPU {self.reference:.4f}"
        if not self.changed:
            return "the update changed no weight"
        if self.losses[-1] >= self.losses[0]:
            return f"the update did not lower the loss ({self.losses[0]:.4f} to {self.losses[-1]:.4f})"
        return ""


def precisions(device: torch.device) -> tuple[Precision, ...]:
    """What is tried: the half precisions of a GPU; on the CPU, where DeepSpeed has no fp16, bf16 and fp32."""
    return ("bf16", "fp16") if device.type == "cuda" else ("bf16", "none")


def verify(device: torch.device) -> Iterator[Finding]:
    """A line for each precision."""
    with _single_process_group(device):
        for precision in precisions(device):
            yield _verify(precision, device)


def _verify(precision: Precision, device: torch.device) -> Finding:
    part = f"{'fp32' if precision == 'none' else precision} steps"
    try:
        with note_if_slow(f"training {part} on {device}, where the first ones wait for compilers ..."), quiet():
            trial = run_trial(precision, device)
    except Exception as error:  # noqa: BLE001 - whatever breaks is the verdict
        return Finding(part, "failed", f"on {device}: {first_line(error)}", _remedy(device))
    if problem := trial.problem():
        return Finding(part, "failed", f"on {device}: {problem}", _remedy(device))
    skipped = f", {trial.skipped} left out while the loss scale fell" if trial.skipped else ""
    losses = " to ".join(f"{loss:.4f}" for loss in trial.losses)
    return Finding(part, "ok", f"{STEPS} on {device}: loss {losses}{skipped}, fp32 on the CPU {trial.reference:.4f}")


def _remedy(device: torch.device) -> str:
    return f"training would not work on {device} either: see the lines above"


def run_trial(precision: Precision, device: torch.device) -> Trial:
    """Train.

    Raises:
        EsmerayError: part of it is not on the device.
        RuntimeError: of torch's, DeepSpeed's or CUDA's.
    """
    training = TrainingSection(amp_dtype=precision, learning_rate=LEARNING_RATE)
    apply_device_settings(training)
    model, batch = build_model(MODEL, seed=0), masked_batch()
    with torch.no_grad():
        output = model(batch)
    targets = int(output.num_targets)
    reference = float(output.loss_sum) / targets
    engine = TrainingEngine(
        model, parameter_groups(model, training.weight_decay), training, DeepSpeedSection(stage=2), device
    )
    try:
        before = engine.full_precision_state()
        losses, norms, skipped = [], [], 0
        for _ in range(MOST_ATTEMPTS):
            output = engine(batch.to(device))
            engine.backward(output.loss_sum, targets)
            result = engine.step(LEARNING_RATE)
            if result.skipped and precision == "fp16":
                skipped += 1
                continue
            losses.append(float(output.loss_sum.detach()) / targets)
            norms.append(result.gradient_norm)
            if len(losses) == STEPS:
                break
        after = engine.full_precision_state()
    finally:
        engine.close()
    changed = any(not torch.equal(before[name], value) for name, value in after.items())
    return Trial(reference, losses, norms, skipped, changed)


def masked_batch() -> PackedBatch:
    """Two sequences, every seventh residue of which is masked and to be predicted; on the CPU."""
    batch = pack_sequences(SEQUENCES)
    residues = (batch.tokens != CLS) & (batch.tokens != EOS)
    masked = residues & (batch.positions % MASKED_EVERY == 0)
    targets = torch.where(masked, batch.tokens, IGNORED_TARGET)
    return replace(batch, tokens=torch.where(masked, MASK, batch.tokens), targets=targets)


@contextmanager
def _single_process_group(device: torch.device) -> Iterator[None]:
    """A group of this process alone, which DeepSpeed needs; one that is there already is used."""
    if dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
