"""Place of a worker among all, its device, and how it reports: all that the training loop knows of its launcher."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class WorkerContext:
    """A worker; by default a single process on the CPU, started by no launcher.

    ``local_rank`` is among the workers on this machine. ``report`` passes metrics to the launcher; every rank calls it
    equally often, as it may be a barrier.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = CPU
    report: Callable[[dict[str, float]], None] = lambda metrics: None

    @property
    def place(self) -> dict[str, Any]:
        """Arguments of :class:`~dataset.batches.steps.TrainingSteps`: whose batches, and on CUDA all of one shape."""
        on_cuda = self.device.type == "cuda"
        return {"rank": self.rank, "world_size": self.world_size, "fixed_shapes": on_cuda}
