"""What a training loop waits for: the share of each step of ESM-2 8M that passes until the next batch is there.

In: batches of a loader. Out: percent. The device is waited for at the end of each step, so that nothing of the
waiting hides behind it: an upper bound of what a loop without that synchronisation waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from benchmarks.harness.stage import Device
from dataset.batches.loader import TrainingBatches
from dataset.packed_batch import PackedBatch
from model.tasks.masked_lm import MaskedLM
from train_config.schema import BackboneSection, ModelSection

_SETTLING_STEPS = 3
"""Steps before any is counted: the loader's process starts, and the allocator learns its sizes."""


class WaitMeter:
    """A plain training loop, masked LM in bf16 with AdamW, that times its waiting."""

    def __init__(self, batches: TrainingBatches, device: Device) -> None:
        section = ModelSection(task="masked_lm", backbone=BackboneSection(source="esm2_t6_8M"))
        self._batches = batches
        self._device = device
        self._model = MaskedLM.build(section, seed=0).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._epoch = 0

    def waiting_percent(self, steps: int) -> float:
        """Train so many steps; waiting as percent of the step, the mean over them."""
        shares = []
        with self._batches:
            coming = self._endless()
            for number in range(_SETTLING_STEPS + steps):
                start_s = time.perf_counter()
                batch = next(coming).to(self._device, non_blocking=True)
                self._synchronize()
                ready_s = time.perf_counter()
                self._step(batch)
                self._synchronize()
                if number >= _SETTLING_STEPS:
                    shares.append((ready_s - start_s) / (time.perf_counter() - start_s))
        return 100 * sum(shares) / len(shares)

    def _endless(self) -> Iterator[PackedBatch]:
        while True:
            for step in self._batches.epoch(self._epoch):
                yield from step
            self._epoch += 1

    def _step(self, batch: PackedBatch) -> None:
        self._optimizer.zero_grad()
        with torch.autocast(self._device, dtype=torch.bfloat16):
            output = self._model(batch)
        (output.loss_sum / output.num_targets).backward()
        self._optimizer.step()

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
