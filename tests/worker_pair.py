"""Two worker processes that tests of two ranks share: importing torch and DeepSpeed takes them longest."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

GRACE_S = 2.0
"""How long is waited for what one says after the other failed: it may wait for that one for ever."""
TIMEOUT_S = 170.0
"""Below the limit of a test."""


class WorkerPair:
    """Ranks 0 and 1 of one gloo group, one thread each; started when first needed, and anew after a failure."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starts = 0
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call ``function(rank, *arguments)`` in both.

        Raises:
            AssertionError: it failed in one, with what that one said; both are ended.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, arguments))
        failures = self._failures()
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._starts += 1
        for rank in range(2):
            ours, theirs = context.Pipe()
            rendezvous = self._folder / f"rendezvous-{self._starts}"
            process = context.Process(target=_serve, args=(rank, str(rendezvous), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _failures(self) -> list[str]:
        waiting = dict(zip(self._connections, range(2), strict=True))
        failures: list[str] = []
        deadline = time.monotonic() + TIMEOUT_S
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left_s):
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    failure = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    failure = "its process ended"
                if failure is not None:
                    failures.append(f"rank {rank}: {failure}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return failures + [f"rank {rank} did not end" for rank in waiting.values()]


def _serve(rank: int, rendezvous: str, orders: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    while True:
        try:
            function, arguments = orders.recv()
        except EOFError:  # the tests are over
            return
        try:
            function(rank, *arguments)
            dist.barrier()
        except BaseException:  # noqa: BLE001 - the test is told
            orders.send(traceback.format_exc())
        else:
            orders.send(None)
