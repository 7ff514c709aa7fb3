"""Place of a worker among all, its device, and how it reports: all that the training loop knows of its launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

CPU = torch.device("cpu")


def _no_report(metrics: dict[str, float]) -> None:
    """There is no launcher to report to."""


@dataclass(frozen=True)
class WorkerContext:
    """A worker; by default a single process on the CPU, started by no launcher.

    Attributes:
        rank: among all workers.
        world_size: number of workers.
        local_rank: among the workers on this machine.
        device: what the worker computes on.
        report: passes metrics to the launcher. Every rank calls it equally often: it may be a barrier.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = CPU
    report: Callable[[dict[str, float]], None] = _no_report
