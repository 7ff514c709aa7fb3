import gc
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
"""Seconds to wait for other ranks after a rank failed; they may hang in a collective."""
TIMEOUT_S = 170.0
"""Shorter than the time limit of a test."""
FORKS = multiprocessing.get_context("forkserver")
"""Fork server whose process has imported a worker's modules."""
FORKS.set_forkserver_preload(
    # The optimizer imports torch's compiler, and the export imports transformers.
    ["esmeray.training.loop.worker", "esmeray.model.backbones.huggingface_loading", "torch._dynamo"]
)


def process_of(function: Callable[..., Any], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """Return an unstarted process for a call, with this process's environment."""
    return FORKS.Process(target=_call_with, args=(dict(os.environ), function, arguments))


class WorkerGroup:
    """Processes of a gloo group, one per rank, each with one thread.

    The processes are reused as long as the number of workers is the same: DeepSpeed 0.19.8 caches its groups for the
    life of a process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._joins = 0
        self._joined = 0
        self._processes: list[ProcessPoolExecutor] = []

    def run(self, function: Callable[..., None], *arguments: Any, workers: int = 2) -> None:
        """Call ``function(rank, *arguments)`` on each rank; if a rank fails, end all and raise an AssertionError."""
        if self._joined != workers:
            self._start(workers)
            self._joins += 1
            self._call(_join, workers, str(self._folder / f"rendezvous-{self._joins}"))
            self._joined = workers
        self._call(_run, dict(os.environ), function, arguments)

    def results(self, *functions: Callable[[], Any]) -> list[Any]:
        """Call each function in its own process and return the results; the processes are not in a group yet."""
        self._start(len(functions))
        return self._call(_run_alone, dict(os.environ), functions)

    def close(self) -> None:
        for pool in self._processes:
            for process in list(pool._processes.values()):  # Python 3.14 has kill_workers()
                process.kill()
            pool.shutdown()
        self._processes, self._joined = [], 0

    def _start(self, count: int) -> None:
        self.close()
        self._processes = [ProcessPoolExecutor(1, FORKS) for _ in range(count)]

    def _call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        calls = [pool.submit(function, rank, *arguments) for rank, pool in enumerate(self._processes)]
        wait(calls, TIMEOUT_S, FIRST_EXCEPTION)
        if any(not call.done() or call.exception() for call in calls):
            wait(calls, GRACE_S)
            failures = [f"rank {rank} {failure}" for rank, call in enumerate(calls) if (failure := _failure(call))]
            self.close()
            raise AssertionError("\n".join(failures))
        return [call.result() for call in calls]


def _join(rank: int, workers: int, rendezvous: str) -> None:
    gc.freeze()  # otherwise a collection, which ZeRO-3 requests, copies a million objects of the parent (copy-on-write)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=workers)


def _run(rank: int, environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    _take(environment)
    function(rank, *arguments)
    dist.barrier()


def _run_alone(rank: int, environment: dict[str, str], functions: tuple[Callable[[], Any], ...]) -> Any:
    _take(environment)
    return functions[rank]()


def _call_with(environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    _take(environment)
    function(*arguments)


def _take(environment: dict[str, str]) -> None:
    # The processes started with another test's environment, e.g. the address and credentials of a store.
    os.environ.clear()
    os.environ.update(environment)


def _failure(call: Future[None]) -> str | None:
    if not call.done():
        return "did not end"
    error = call.exception()
    return None if error is None else "".join(traceback.format_exception(error))
