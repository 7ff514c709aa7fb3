"""What chosen processes take: memory and CPU time of each and of all that they started.

In: process ids. Out: figures of a row of the log, the ids of all, and whether any of those watched is still there. One
that ends while it is looked at is left out; one whose id goes to another process is told apart by when it began.
"""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from common.errors import ConfigError
from monitoring.sampling.host import Rates, descendants


class Watched:
    """The processes.

    Args:
        pids: their ids; none gives no figures.

    Raises:
        ConfigError: one is not there.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._processes = [_process(pid) for pid in pids]
        self._cpu = Rates()

    def alive(self) -> bool:
        """Whether any is left; True where there is none to watch."""
        return not self._processes or any(_running(process) for process in self._processes)

    def read(self) -> dict[str, float]:
        """``watched_rss_bytes`` and ``watched_cpu_percent`` (100 a core; not in the first reading)."""
        if not self._processes:
            return {}
        rss_bytes, cpu_s = 0, {}
        for process in self._trees():
            try:
                rss_bytes += process.memory_info().rss
                times = process.cpu_times()
            except psutil.Error:
                continue  # it has ended since, or is another user's
            cpu_s[str(process.pid)] = times.user + times.system
        figures = {"watched_rss_bytes": float(rss_bytes)}
        rates = self._cpu.of(cpu_s)
        return figures | ({"watched_cpu_percent": 100.0 * sum(rates.values())} if rates else {})

    def ids(self) -> set[int]:
        """Of those that are left and of all that they started."""
        return {process.pid for process in self._trees()}

    def _trees(self) -> list[psutil.Process]:
        """Each process once, though one watched may have started another."""
        running = [process for process in self._processes if _running(process)]
        found = {process.pid: process for process in running}
        for process in running:
            found |= {child.pid: child for child in descendants(process)}
        return list(found.values())


def _process(pid: int) -> psutil.Process:
    try:
        return psutil.Process(pid)
    except psutil.Error as error:
        raise ConfigError(f"--pid {pid}: there is no such process") from error


def _running(process: psutil.Process) -> bool:
    """Not so for one that has ended and waits for its parent to notice."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
