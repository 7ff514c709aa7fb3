import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRACE_S = 2.0
"""Wait for one rank after another has failed, which it may wait for for ever."""
TIMEOUT_S = 170.0
"""Below the limit of a test."""


class WorkerGroup:
    """Ranks of a gloo group, one thread each, kept since importing torch and DeepSpeed takes them longest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._joins = 0
        self._joined = 0
        self._processes: list[ProcessPoolExecutor] = []

    def run(self, function: Callable[..., None], *arguments: Any, workers: int = 2) -> None:
        """Call ``function(rank, *arguments)`` in all; what one failed with is an AssertionError that ends all."""
        spawn = multiprocessing.get_context("spawn")
        while len(self._processes) < workers:
            self._processes.append(ProcessPoolExecutor(1, spawn))
        if self._joined != workers:
            self._joins += 1
            rendezvous = str(self._folder / f"rendezvous-{self._joins}")
            self._call(_leave, len(self._processes))
            self._call(_join, workers, workers, rendezvous)
            self._joined = workers
        self._call(_run, workers, dict(os.environ), function, arguments)

    def close(self) -> None:
        for pool in self._processes:
            for process in list(pool._processes.values()):  # Python 3.14 has kill_workers()
                process.kill()
            pool.shutdown()
        self._processes, self._joined = [], 0

    def _call(self, function: Callable[..., None], count: int, *arguments: Any) -> None:
        calls = [pool.submit(function, rank, *arguments) for rank, pool in enumerate(self._processes[:count])]
        wait(calls, TIMEOUT_S, FIRST_EXCEPTION)
        if any(not call.done() or call.exception() for call in calls):
            wait(calls, GRACE_S)
            failures = [f"rank {rank} {failure}" for rank, call in enumerate(calls) if (failure := _failure(call))]
            self.close()
            raise AssertionError("\n".join(failures))


def _leave(rank: int) -> None:
    """Forget the last group, and what DeepSpeed 0.19.8 keeps of it for as long as a process lives."""
    if not dist.is_initialized():
        return
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import parameter_offload, partition_parameters
    from deepspeed.utils import groups

    dist.destroy_process_group()
    comm.cdb = None
    importlib.reload(groups)
    # ZeRO-3 numbers modules and parameters, and ranks compare these: a new process has seen fewer.
    parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    partition_parameters.Init.param_id = 0
    # It replaces torch's linear, whose gradients then come in another order than in a process that saw no ZeRO-3.
    patch = partition_parameters.InsertPostInitMethodToModuleSubClasses
    torch.nn.functional.linear = getattr(patch, "linear_bk", torch.nn.functional.linear)


def _join(rank: int, workers: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=workers)


def _run(rank: int, environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # The processes began with another test's: a store's address and credentials among them.
    os.environ.clear()
    os.environ.update(environment)
    function(rank, *arguments)
    dist.barrier()


def _failure(call: Future[None]) -> str | None:
    if not call.done():
        return "did not end"
    error = call.exception()
    return None if error is None else "".join(traceback.format_exception(error))
