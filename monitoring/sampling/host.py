"""What the machine and a worker's own processes are doing: memory, CPU, disk and network, by psutil.

In: nothing but the machine. Out: figures by name, without a GPU or a driver. What counts up (CPU time, bytes) is told
as a rate between two readings, so that the first reading lacks it. In a container, memory is that of its cgroup where
this is tighter than the machine's; disk and network are the machine's, or what the container sees of them.

Resident memory of a worker is summed over it and the processes that it started (its loaders). Pages that they share
(code, the mapped store, what a fork has not written to since) are counted in each of them, as ``top`` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_BLOCKS = Path("/sys/block")


@dataclass(frozen=True)
class Memory:
    """Of the machine or the container, whichever is tighter; bytes."""

    total: int
    available: int


@dataclass
class Rates:
    """Differences of counters a second, from call to call."""

    clock: Callable[[], float] = time.monotonic
    _values: dict[str, float] = field(default_factory=dict)
    _at_s: float = 0.0

    def of(self, values: dict[str, float]) -> dict[str, float]:
        """Units a second since the last call; none for what is new or has begun anew."""
        now_s = self.clock()
        elapsed_s, earlier = now_s - self._at_s, self._values
        self._values, self._at_s = values, now_s
        if elapsed_s <= 0:
            return {}
        return {
            name: (value - earlier[name]) / elapsed_s
            for name, value in values.items()
            if name in earlier and value >= earlier[name]
        }


class HostSampler:
    """Reads the machine.

    Args:
        clock: seconds; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._io = Rates(clock)
        self._cpu: tuple[float, float] | None = None

    def read(self) -> dict[str, float]:
        """``mem/host_*_bytes``, ``cpu/percent`` (of all cores), ``disk/*`` and ``net/*_bytes_per_s``; what is known."""
        memory = memory_of_this_machine()
        figures = {
            "mem/host_total_bytes": float(memory.total),
            "mem/host_available_bytes": float(memory.available),
            "mem/host_used_bytes": float(memory.total - memory.available),
        }
        busy_percent = self._busy_percent()
        if busy_percent is not None:
            figures["cpu/percent"] = busy_percent
        return figures | self._io.of(_counters())

    def _busy_percent(self) -> float | None:
        times = psutil.cpu_times()
        total = (
            sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        )  # which user and nice have
        busy = total - times.idle - getattr(times, "iowait", 0.0)
        earlier, self._cpu = self._cpu, (busy, total)
        if earlier is None or total <= earlier[1]:
            return None
        return min(100.0, max(0.0, 100.0 * (busy - earlier[0]) / (total - earlier[1])))


class ProcessSampler:
    """Reads this process and those that it started.

    Args:
        clock: seconds; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._own = psutil.Process()
        self._cpu = Rates(clock)

    def read(self) -> dict[str, float]:
        """``rss_bytes`` and ``cpu_percent`` (100 a core), each summed over the processes."""
        rss_bytes, cpu_s = 0, {}
        for process in (self._own, *descendants(self._own)):
            try:
                rss_bytes += process.memory_info().rss
                times = process.cpu_times()
            except psutil.Error:
                continue  # it has ended since
            cpu_s[str(process.pid)] = times.user + times.system
        figures = {"rss_bytes": float(rss_bytes)}
        rates = self._cpu.of(cpu_s)
        if rates:
            figures["cpu_percent"] = 100.0 * sum(rates.values())
        return figures


def memory_of_this_machine() -> Memory:
    """Total and available memory, within what the cgroup (v2 or v1) of this process allows."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit, used in _cgroup_memory():
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return Memory(total, available)


def _counters() -> dict[str, float]:
    """Bytes since the machine started. A container or a machine without disks may have no counters."""
    counters: dict[str, float] = {}
    if disks := _disks():
        counters["disk/read_bytes_per_s"] = sum(disk.read_bytes for disk in disks)
        counters["disk/write_bytes_per_s"] = sum(disk.write_bytes for disk in disks)
    if (net := psutil.net_io_counters()) is not None:
        counters |= {"net/sent_bytes_per_s": net.bytes_sent, "net/received_bytes_per_s": net.bytes_recv}
    return counters


def _disks() -> list[Any]:
    """Counters of each disk. What LVM, encryption or RAID make of disks would count the same bytes again."""
    every = psutil.disk_io_counters(perdisk=True) or {}
    real = [counters for name, counters in every.items() if (_BLOCKS / name.replace("/", "!") / "device").exists()]
    return real or list(every.values())


def _cgroup_memory() -> list[tuple[int, int]]:
    """Limit and use, in bytes, of the cgroups that this process is in, where they have a limit.

    File cache, which the kernel would give back, is not counted as used, whether it was touched once or more often.
    """
    found = []
    for folder, limit_file, used_file in _cgroup_folders():
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is not None and used is not None:
            found.append((limit, max(0, used - _file_cache_bytes(folder))))
    return found


def _cgroup_folders() -> list[tuple[Path, str, str]]:
    """Folders from this process's cgroup up to the root, with the names of their files of limit and use."""
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = _CGROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, files = _CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container that sees its own cgroup as the root, the path is the machine's and leads nowhere.
        folder = root / path.lstrip("/")
        folders += [(place, *files) for place in (folder, *folder.parents) if place.is_relative_to(root)]
    return folders


def _file_cache_bytes(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(maxsplit=1) for line in lines if " " in line)
    kinds = ("inactive_file", "active_file")
    return sum(int(values.get(f"total_{kind}", values.get(kind, 0))) for kind in kinds)


def _number(path: Path) -> int | None:
    """None for a file that is absent or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """Processes that this one started, directly or not.

    Linux tells them for each thread; going through all processes of the machine, as psutil does, costs more the more
    there are.
    """
    threads = _PROC / str(process.pid) / "task"
    if not (threads / str(process.pid) / "children").exists():
        return process.children(recursive=True)
    return [found for pid in _descendant_ids(process.pid) if (found := _process(pid)) is not None]


def _descendant_ids(pid: int) -> list[int]:
    try:
        threads = list((_PROC / str(pid) / "task").iterdir())
    except OSError:
        return []  # it has ended since
    children = [int(child) for thread in threads for child in _read_if_there(thread / "children").split()]
    return children + [further for child in children for further in _descendant_ids(child)]


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _read_if_there(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # the thread, or the process, has ended since
