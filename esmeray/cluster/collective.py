"""A worker among all: its rank and device, and what workers exchange beside gradients.

That is four integers a step, and sums of metrics now and then. They travel through a gloo group of their own, in host
memory, so that no GPU is synchronised for them.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

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


@dataclass(frozen=True)
class WorkerContext:
    """All that the training loop knows of its launcher; by default a single process on the CPU, started by none.

    ``local_rank`` is among the workers on this machine. ``report`` passes metrics to the launcher; every rank calls it
    equally often, as it may be a barrier. ``replaced``: the launcher starts the workers again where one is lost.
    ``resized``: why this attempt has another number of workers than the last.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = CPU
    report: Callable[[dict[str, float]], None] = lambda metrics: None
    replaced: bool = False
    resized: dict[str, Any] | None = None


def prepare_environment() -> None:
    """Remove the variables of mpirun, torchrun, Azure ML and the like from the environment of this worker.

    They describe the processes of that launcher. DeepSpeed (0.19.8), accelerate and transformers read them as this
    group's: DeepSpeed refuses to begin when its LOCAL_RANK is not OMPI_COMM_WORLD_LOCAL_RANK.
    """
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS) or name in _RANKS]:
        del os.environ[name]


def join_alone(backend: str) -> None:
    """Make a process group of this process alone."""
    prepare_environment()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@dataclass(frozen=True)
class StepAgreement:
    """Tokens of the global batch, those with a target too, and whether some worker was asked to stop or failed."""

    targets: int
    tokens: int
    stop: bool
    failed: bool


class ControlGroup:
    """All workers, through gloo. Every worker makes the same calls."""

    def __init__(self) -> None:
        # Beside NCCL's, which would wait for the device at each number.
        self._group = dist.new_group(backend="gloo") if dist.get_backend() != "gloo" else dist.group.WORLD

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self._group)

    def agree(self, targets: int, tokens: int, *, stop: bool, failed: bool) -> StepAgreement:
        """Add up what each worker says, once a step."""
        # One message: a collective costs its round through the network, whatever its size.
        sums = torch.tensor([targets, tokens, int(stop), int(failed)], dtype=torch.int64)
        dist.all_reduce(sums, group=self._group)
        targets, tokens, stops, failures = (int(value) for value in sums)
        return StepAgreement(targets, tokens, stops > 0, failures > 0)

    def ran_out(self, here: bool, tokens: int) -> tuple[bool, int]:
        """Out of memory on some worker, and the most tokens that it happened with."""
        # The largest: a worker with memory enough says 0.
        most = torch.tensor([int(here), tokens], dtype=torch.int64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        return bool(most[0]), int(most[1])

    def sum(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Element-wise float64 sums over the workers; every worker gives the same names and shapes."""
        if not values:
            return {}
        # Every worker lays them out alike, in whatever order they came to it.
        names = sorted(values)
        # One copy to the host and one collective for all, in float64: fp32 counts tokens exactly to 2**24 only.
        flat = torch.cat([values[name].detach().to("cpu", torch.float64).reshape(-1) for name in names])
        dist.all_reduce(flat, group=self._group)
        parts = torch.split(flat, [values[name].numel() for name in names])
        return {name: total.reshape(values[name].shape) for name, total in zip(names, parts, strict=True)}

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows (n, ...) of all workers in host memory, rank after rank, on every worker; n may differ."""
        return torch.cat(self.gather(rows))

    def gather(self, value: Any) -> list[Any]:
        """The values of all workers, by rank, on every worker."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def all_true(self, value: bool) -> bool:
        return all(self.gather(value))

    def from_rank_0(self, value: Value) -> Value:
        """The value of rank 0, on every worker: what it sees of a file system decides."""
        values = [value]
        dist.broadcast_object_list(values, 0, group=self._group)
        return values[0]


class MetricSums:
    """This worker's sums of metrics over batches (``own``), float64 on the device: additive, and no mean of means."""

    def __init__(self) -> None:
        self.own: dict[str, Tensor] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            self.own[name] = self.own[name] + value if name in self.own else value.double()
