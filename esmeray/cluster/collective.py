"""Rank and device of a worker, and the values that workers exchange in addition to gradients.

These are four integers per step, and sums of metrics now and then. They are exchanged in host memory by a separate gloo
group, so that they need no GPU synchronization.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")
Value = TypeVar("Value")

_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "MPI_", "AZUREML_", "SM_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_")
_RANKS = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class WorkerContext(NamedTuple):
    """The training loop's view of its launcher. Default: a single process on the CPU, without a launcher.

    Attributes:
        local_rank: rank among the workers on this machine.
        report: function that passes metrics to the launcher. Every rank calls it equally often, because it may be a
            barrier.
        replaced: the launcher starts the workers again if one is lost.
        resized: reason for a number of workers that differs from the previous attempt's.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = CPU
    report: Callable[[dict[str, float]], None] = lambda metrics: None
    replaced: bool = False
    resized: dict[str, Any] | None = None


def prepare_environment() -> None:
    """Remove the variables of mpirun, torchrun, Azure ML and similar launchers from this worker's environment.

    They describe the processes of that launcher, but DeepSpeed (0.19.8), accelerate and transformers apply them to this
    group. DeepSpeed refuses to start if LOCAL_RANK differs from OMPI_COMM_WORLD_LOCAL_RANK.
    """
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS) or name in _RANKS]:
        del os.environ[name]


def join_alone(backend: str) -> None:
    """Join a process group that has this process only."""
    prepare_environment()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


class StepAgreement(NamedTuple):
    """Totals over all workers in a step.

    ``targets`` and ``tokens`` count the global batch; ``targets`` are its tokens with a target. ``stop``: a worker was
    asked to stop. ``failed``: the step failed on a worker.
    """

    targets: int
    tokens: int
    stop: bool
    failed: bool


class ControlGroup:
    """Collectives of all workers over gloo. Every worker makes the same calls."""

    def __init__(self) -> None:
        # In addition to the NCCL group, which would synchronize with the device for each number.
        self._group = dist.new_group(backend="gloo") if dist.get_backend() != "gloo" else dist.group.WORLD

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self._group)

    def agree(self, targets: int, tokens: int, *, stop: bool, failed: bool) -> StepAgreement:
        """Sum the values of all workers, once per step."""
        # One message, because a small collective costs a network round trip, whatever its size.
        sums = torch.tensor([targets, tokens, int(stop), int(failed)], dtype=torch.int64)
        dist.all_reduce(sums, group=self._group)
        targets, tokens, stops, failures = (int(value) for value in sums)
        return StepAgreement(targets, tokens, stops > 0, failures > 0)

    def any_out_of_memory(self, here: bool, tokens: int) -> tuple[bool, int]:
        """Return whether any worker was out of memory, and the maximum ``tokens`` of these workers."""
        # Workers with enough memory pass 0 tokens.
        most = torch.tensor([int(here), tokens], dtype=torch.int64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        return bool(most[0]), int(most[1])

    def sum(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Element-wise float64 sums over the workers. Every worker passes the same names and shapes."""
        if not values:
            return {}
        # Sorted, so that every worker has the same layout, whatever the order of its values.
        names = sorted(values)
        # One copy to the host and one collective for all values. In float64, because fp32 counts tokens exactly only up
        # to 2**24.
        flat = torch.cat([values[name].detach().to("cpu", torch.float64).reshape(-1) for name in names])
        dist.all_reduce(flat, group=self._group)
        parts = torch.split(flat, [values[name].numel() for name in names])
        return {name: total.reshape(values[name].shape) for name, total in zip(names, parts, strict=True)}

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Return the rows (n, ...) of all workers, concatenated by rank in host memory. n may differ by worker."""
        return torch.cat(self.gather(rows))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers, by rank, on every worker."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def all_true(self, value: bool) -> bool:
        return all(self.gather(value))

    def from_rank_0(self, value: Value) -> Value:
        """Return the value of rank 0 on every worker, e.g. if workers may see different states of a file system."""
        values = [value]
        dist.broadcast_object_list(values, 0, group=self._group)
        return values[0]


class MetricSums:
    """Sums of this worker's metrics over batches (``own``), float64 on the device. They are additive, unlike means."""

    def __init__(self) -> None:
        self.own: dict[str, Tensor] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            self.own[name] = self.own[name] + value if name in self.own else value.double()
