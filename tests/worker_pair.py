import multiprocessing
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRACE_S = 2.0
"""Wait for one rank after the other has failed, which it may wait for for ever."""
TIMEOUT_S = 170.0
"""Below the limit of a test."""


class WorkerPair:
    """Ranks 0 and 1 of a gloo group, one thread each, kept since importing torch and DeepSpeed takes them longest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starts = 0
        self._ranks: list[ProcessPoolExecutor] = []

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call ``function(rank, *arguments)`` in both; what one failed with is an AssertionError that ends both."""
        if not self._ranks:
            self._start()
        calls = [pool.submit(_call, function, rank, arguments) for rank, pool in enumerate(self._ranks)]
        wait(calls, TIMEOUT_S, FIRST_EXCEPTION)
        if any(not call.done() or call.exception() for call in calls):
            wait(calls, GRACE_S)
            failures = [f"rank {rank} {failure}" for rank, call in enumerate(calls) if (failure := _failure(call))]
            self.close()
            raise AssertionError("\n".join(failures))

    def close(self) -> None:
        for pool in self._ranks:
            for process in list(pool._processes.values()):  # Python 3.14 has kill_workers()
                process.kill()
            pool.shutdown()
        self._ranks = []

    def _start(self) -> None:
        self._starts += 1
        rendezvous = str(self._folder / f"rendezvous-{self._starts}")
        spawn = multiprocessing.get_context("spawn")
        self._ranks = [ProcessPoolExecutor(1, spawn, _join, (rank, rendezvous)) for rank in range(2)]


def _join(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)


def _call(function: Callable[..., None], rank: int, arguments: tuple[Any, ...]) -> None:
    function(rank, *arguments)
    dist.barrier()


def _failure(call: Future[None]) -> str | None:
    if not call.done():
        return "did not end"
    error = call.exception()
    return None if error is None else "".join(traceback.format_exception(error))
