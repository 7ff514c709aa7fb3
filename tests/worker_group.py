import importlib
import multiprocessing
import os
import sys
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
        self._start(workers)
        if self._joined != workers:
            self._joins += 1
            rendezvous = str(self._folder / f"rendezvous-{self._joins}")
            self._call(_leave, len(self._processes))
            self._call(_join, workers, workers, rendezvous)
            self._joined = workers
        self._call(_run, workers, dict(os.environ), function, arguments)

    def results(self, *functions: Callable[[], Any]) -> list[Any]:
        """What functions return, each called in a process of its own that is in no group, and may make one."""
        self._start(len(functions))
        self._joined = 0
        self._call(_leave, len(self._processes))
        return self._call(_run_alone, len(functions), dict(os.environ), functions)

    def close(self) -> None:
        for pool in self._processes:
            for process in list(pool._processes.values()):  # Python 3.14 has kill_workers()
                process.kill()
            pool.shutdown()
        self._processes, self._joined = [], 0

    def _start(self, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        while len(self._processes) < count:
            self._processes.append(ProcessPoolExecutor(1, spawn))

    def _call(self, function: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
        calls = [pool.submit(function, rank, *arguments) for rank, pool in enumerate(self._processes[:count])]
        wait(calls, TIMEOUT_S, FIRST_EXCEPTION)
        if any(not call.done() or call.exception() for call in calls):
            wait(calls, GRACE_S)
            failures = [f"rank {rank} {failure}" for rank, call in enumerate(calls) if (failure := _failure(call))]
            self.close()
            raise AssertionError("\n".join(failures))
        return [call.result() for call in calls]


def _leave(rank: int) -> None:
    """Forget the last group, and what DeepSpeed 0.19.8 keeps of it for as long as a process lives."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import parameter_offload, partition_parameters
    from deepspeed.utils import groups

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
    _take(environment)
    function(rank, *arguments)
    dist.barrier()


def _run_alone(rank: int, environment: dict[str, str], functions: tuple[Callable[[], Any], ...]) -> Any:
    _take(environment)
    return functions[rank]()


def _take(environment: dict[str, str]) -> None:
    # The processes began with another test's: a store's address and credentials among them.
    os.environ.clear()
    os.environ.update(environment)


def _failure(call: Future[None]) -> str | None:
    if not call.done():
        return "did not end"
    error = call.exception()
    return None if error is None else "".join(traceback.format_exception(error))
