"""Sums of metrics over batches and workers, and evaluation on held-out sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from dataset.packed_batch import PackedBatch
from training.engine.collective import ControlGroup
from training.engine.engine import TrainingEngine


class MetricSums:
    """Adds up what each batch gives; additive, so that figures are those of the whole and no mean of means."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        """Add one batch, without waiting for the device."""
        for name, value in metrics.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value.double()

    def over_workers(self, control: ControlGroup) -> dict[str, Tensor]:
        """The sums over all workers, float64 in host memory. Every worker calls it."""
        return control.sum(self._sums)


@torch.no_grad()
def evaluate(
    engine: TrainingEngine,
    steps: Iterable[Iterable[PackedBatch]],
    control: ControlGroup,
    stop_requested: Callable[[], bool],
) -> dict[str, Tensor]:
    """Metric sums of the task over batches, each worker its own part. Every worker calls it.

    Returns:
        Nothing where there is no batch, or where a stop was asked for in between.
    """
    engine.module.eval()
    sums = MetricSums()
    stopped = False
    for batches in steps:
        stopped = control.agree(0, 0, stop=stop_requested(), failed=False).stop
        if stopped:
            break
        for batch in batches:
            sums.add(engine(batch.to(engine.device, non_blocking=True)).metrics)
    engine.module.train()
    return {} if stopped else sums.over_workers(control)
