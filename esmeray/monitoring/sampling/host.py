"""Memory, CPU, disk and network of the machine and of a process, read with psutil.

Counters (CPU time, bytes) are reported as rates between two readings, so the first reading lacks them. Memory summed
over processes counts shared pages once per process, as ``top`` does.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from esmeray.common.processor import cgroup_folders


class Memory(NamedTuple):
    """Memory of the machine or of the container, whichever is lower; bytes."""

    total: int
    available: int


class Rates:
    """Rates of counters per second between calls."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._at_s = clock, 0.0
        self._values: dict[str, float] = {}

    def of(self, values: dict[str, float]) -> dict[str, float]:
        """Return units per second since the last call; new and reset counters are left out."""
        now_s = self._clock()
        elapsed_s, earlier = now_s - self._at_s, self._values
        self._values, self._at_s = values, now_s
        # Two calls may fall within the clock's resolution. A counter that shrank was reset, or belongs to another
        # process with the same id: its rate is unknown.
        return {
            name: (value - earlier[name]) / elapsed_s
            for name, value in values.items()
            if elapsed_s > 0 and name in earlier and value >= earlier[name]
        }


class HostSampler:
    """Sampler of the machine. ``clock`` returns seconds; for tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._io = Rates(clock)
        self._has_read = False

    def read(self) -> dict[str, float]:
        """Return memory (``host/mem_*_bytes``), ``host/cpu_percent`` (all cores), and rates of disks and network."""
        total, available = map(float, memory_of_this_machine())
        metrics = {
            "host/mem_total_bytes": total,
            "host/mem_available_bytes": available,
            "host/mem_used_bytes": total - available,
        }
        busy_percent = psutil.cpu_percent()  # since the last call
        if self._has_read:  # psutil's first value is a meaningless 0
            metrics["host/cpu_percent"] = busy_percent
        self._has_read = True
        return metrics | self._io.of(_counters())


class ProcessSampler:
    """Sampler of this process and its descendants."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._cpu = Rates(time.monotonic)

    def read(self) -> dict[str, float]:
        """Return ``rss_bytes`` and ``cpu_percent`` (100 per core.

        Not in the first reading), summed over the process tree.
        """
        processes, rss_bytes, cpu_s = [self._process], 0, {}
        with contextlib.suppress(psutil.Error):  # a child has ended
            processes += self._process.children(recursive=True)
        # Per process: the total would fall when a loader ends, since its CPU time is lost.
        for process in processes:
            with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
                rss_bytes += process.memory_info().rss
                times = process.cpu_times()
                cpu_s[str(process.pid)] = times.user + times.system
        metrics = {"rss_bytes": float(rss_bytes)}
        rates = self._cpu.of(cpu_s)
        return metrics | ({"cpu_percent": 100.0 * sum(rates.values())} if rates else {})


def memory_of_this_machine() -> Memory:
    """Return total and available memory within the limits of this process's cgroups (v2 or v1).

    File cache, active or inactive, is not counted as used, since the kernel can reclaim it.
    """
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    # The tightest limit of all groups up to the root: a job's own group may have none while its parent does.
    for folder, is_v2 in cgroup_folders("memory"):
        names = ["memory.max", "memory.current"] if is_v2 else ["memory.limit_in_bytes", "memory.usage_in_bytes"]
        with contextlib.suppress(OSError, ValueError):  # a file is absent, or says "max": no limit
            limit, used = (int((folder / name).read_text()) for name in names)
            # cgroup v1 encodes "no limit" as a number near 2^63.
            total = min(total, limit)
            available = min(available, max(0, limit - max(0, used - _file_cache_bytes(folder))))
    return Memory(total, available)


def _counters() -> dict[str, float]:
    """Return bytes since the machine started; empty if there are no counters (container, no disks)."""
    counters: dict[str, float] = {}
    devices = psutil.disk_io_counters(perdisk=True) or {}
    # LVM, encryption and RAID devices would count the same bytes again.
    real = [disk for name, disk in devices.items() if Path("/sys/block", name.replace("/", "!"), "device").exists()]
    if disks := real or list(devices.values()):  # a sandbox's /sys may show no device
        counters["host/disk_read_bytes_per_s"] = sum(disk.read_bytes for disk in disks)
        counters["host/disk_write_bytes_per_s"] = sum(disk.write_bytes for disk in disks)
    if (net := psutil.net_io_counters()) is not None:
        counters |= {"host/net_sent_bytes_per_s": net.bytes_sent, "host/net_received_bytes_per_s": net.bytes_recv}
    return counters


def _file_cache_bytes(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(maxsplit=1) for line in lines)
    # v1 has totals including child groups under "total_", v2 without the prefix; the limit applies to the total.
    return sum(int(values.get(f"total_{kind}", values.get(kind, 0))) for kind in ("inactive_file", "active_file"))
