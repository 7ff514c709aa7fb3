"""Properties of this machine that defaults of settings depend on, the cgroups that limit this process, and its heap.

Imports only the standard library.
"""

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

CPU_INFO = Path("/proc/cpuinfo")
CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
_BF16 = re.compile(r"\b(avx512_bf16|amx_bf16|bf16)\b")
"""CPU flags of bf16 support: the first two on x86, the last on Arm."""


def has_gpu_driver() -> bool:
    """Look for CUDA's driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def default_precision(on_cuda: bool) -> Literal["bf16", "fp32"]:
    """Default precision on this machine: bf16 on CUDA and on CPUs with bf16 instructions, otherwise fp32."""
    return "bf16" if on_cuda or cpu_computes_bf16() else "fp32"


def cpu_computes_bf16() -> bool:
    """Look for the processor's instructions for bf16.

    A processor without them multiplies matrices in bf16 six times slower than in fp32, and trains thirty times slower
    (torch 2.13, oneDNN 3; AVX2).
    """
    try:
        return _BF16.search(CPU_INFO.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        return False


def give_back_memory() -> None:
    """Make glibc return freed memory to the system; it would keep it for later allocations."""
    with suppress(OSError, AttributeError):  # with another C library
        ctypes.CDLL(None).malloc_trim(0)


def usable_cpus() -> int:
    """Number of CPU cores that this process may use at once, however many the machine has; at least 1.

    A quota of half a core counts as one: nothing can be placed on less.
    """
    cpus = [float(len(os.sched_getaffinity(0)))]
    # The tightest quota of all groups up to the root holds: a job's group may have none while its parent has one.
    for folder, is_v2 in cgroup_folders("cpu"):
        names = ["cpu.max"] if is_v2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        # The file is missing, or says "max": no quota.
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota_us, period_us = map(int, " ".join((folder / name).read_text() for name in names).split())
            if quota_us > 0:  # cgroup v1 says "no quota" by -1
                cpus.append(quota_us / period_us)
    return max(1, int(min(cpus)))


def cgroup_folders(controller: str) -> list[tuple[Path, bool]]:
    """Folders from this process's cgroup up to the root that may limit memory or cpu, and whether each is of v2."""
    try:
        lines = CGROUP.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controller if controllers else CGROUPS
        # In a container that sees its own cgroup as the root, the path is the host's and does not exist.
        folder = root / path.lstrip("/")
        folders += [(group, not controllers) for group in (folder, *folder.parents) if group.is_relative_to(root)]
    return folders
