"""Share of each step of ESM-2 8M that a training loop waits until the next batch is there.

In: batches of a loader. Out: percent. The device is waited for at the end of each step, so that nothing of the
waiting hides behind it: an upper bound of what a loop without that synchronisation waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import torch

from benchmarks.harness.stage import Device
from common.timing import timed
from dataset.batches.steps import TrainingSteps
from dataset.packed_batch import PackedBatch
from model.tasks.masked_lm import MaskedLM
from train_config.schema import BackboneSection, ModelSection

_SETTLING_STEPS = 3
"""Steps before any is counted: the loader's process starts, and the allocator learns its sizes."""


def waiting_meter(batches: TrainingSteps, device: Device) -> Callable[[int], float]:
    """A plain training loop, masked LM in bf16 with AdamW, that times its waiting.

    Returns:
        Trains so many steps; returns waiting as percent of a step, the mean over them.
    """
    section = ModelSection(task="masked_lm", backbone=BackboneSection(source="esm2_t6_8M"))
    model = MaskedLM.build(section, seed=0).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train(batch: PackedBatch) -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            output = model(batch)
        (output.loss_sum / output.num_targets).backward()
        optimizer.step()

    def waiting_share(coming: Iterator[PackedBatch]) -> float:
        batch, waited_s = timed(lambda: next(coming).to(device, non_blocking=True))
        _, trained_s = timed(lambda: train(batch))
        return waited_s / (waited_s + trained_s)

    def waiting_percent(steps: int) -> float:
        with batches:
            coming = (batch for epoch in count() for step in batches.epoch(epoch) for batch in step)
            shares = [waiting_share(coming) for _ in range(_SETTLING_STEPS + steps)][_SETTLING_STEPS:]
        return 100 * sum(shares) / steps

    return waiting_percent
