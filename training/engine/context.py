"""Where a worker finds itself: rank, device, and how it reports. The loop knows no more of its launcher than this."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

import torch

from training.engine.device import choose_device


class WorkerContext(Protocol):
    """What the training loop needs to know of whatever started it."""

    @property
    def rank(self) -> int:
        """Of this worker, among all."""

    @property
    def world_size(self) -> int:
        """Workers in all."""

    @property
    def local_rank(self) -> int:
        """Of this worker, among those on its machine."""

    @property
    def device(self) -> torch.device:
        """What it computes on."""

    def report(self, metrics: dict[str, float]) -> None:
        """Tell the launcher how training stands. Every rank calls it equally often: it may be a barrier."""


CPU = torch.device("cpu")


@dataclass(frozen=True)
class StandaloneContext:
    """A worker started by torchrun, or a single process on its own."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = CPU

    @classmethod
    def from_environment(cls) -> StandaloneContext:
        """Read the variables that torchrun sets."""
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        return cls(
            rank=int(os.environ.get("RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            local_rank=local_rank,
            device=choose_device(local_rank),
        )

    def report(self, metrics: dict[str, float]) -> None:
        """Nobody to tell."""
