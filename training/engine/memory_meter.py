"""How much memory a worker needs and how much there is, on a GPU or on the CPU.

On a GPU torch's allocator knows both. On the CPU the resident memory of the whole process is measured; where a limit is
given it stands in for a device's memory, so that running out can be met, and tried, without a GPU. Halving a batch or
reporting a trial is left to others.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil
import torch

from monitoring.sampling.host import memory_of_this_machine

PROC = Path("/proc/self")
RESET_PEAK = "5"
"""What ``clear_refs`` takes to set the peak of resident memory to the present value (Linux 4.0, man 5 proc)."""

SAMPLING_INTERVAL_S = 0.01
OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 2",
)
"""How those say it that allocate beside torch's caching allocator: CUDA itself, cuBLAS, cuDNN, NCCL."""


class MemoryMeter:
    """Peak and total memory of what a worker computes on.

    On the CPU the kernel keeps one peak for a process: meters of the same process reset each other's.

    Args:
        device: what the worker computes on.
        limit_bytes: on the CPU, resident memory beyond which :meth:`check` says that memory ran out.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._limit_bytes = limit_bytes
        self._resident: _Peak | None = None if self._cuda else _resident_peak()
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget what was needed so far; the peak is now what is in use."""
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        elif self._resident is not None:
            self._resident.reset()

    def peak_bytes(self) -> int:
        """Most memory in use since :meth:`reset_peak`.

        On CUDA what torch had reserved; on the CPU the resident memory of the process with its code and libraries.
        """
        if self._resident is None:
            return torch.cuda.max_memory_reserved(self._cuda)
        return self._resident.read()

    def total_bytes(self) -> int:
        """Memory of the GPU; on the CPU the limit, else what this machine has or its container may use."""
        if self._cuda is not None:
            return torch.cuda.mem_get_info(self._cuda)[1]
        return self._limit_bytes or memory_of_this_machine().total

    def check(self) -> None:
        """On the CPU: see whether the limit held. On a GPU the allocator notices by itself.

        Raises:
            torch.OutOfMemoryError: the peak passed the limit.
        """
        if self._resident is None or self._limit_bytes is None:
            return
        if (peak := self.peak_bytes()) > self._limit_bytes:
            raise torch.OutOfMemoryError(
                f"the process took {mib(peak)} of memory, {mib(self._limit_bytes)} is what it may take"
            )

    def free(self) -> None:
        """Give back what nothing holds any more, and reset the peak."""
        gc.collect()
        if self._cuda is not None:
            torch.cuda.empty_cache()
        else:
            _trim_heap()
        self.reset_peak()

    def close(self) -> None:
        """End the thread that samples, where there is one."""
        if isinstance(self._resident, _SampledPeak):
            self._resident.close()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: on a GPU, on the CPU, or of a :class:`MemoryMeter`'s limit."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


def mib(size_bytes: float) -> str:
    """Bytes for a person."""
    return f"{size_bytes / 2**20:,.0f} MiB"


class _Peak(Protocol):
    """The peak of this process's resident memory."""

    def reset(self) -> None:
        """Start at what is resident now."""

    def read(self) -> int:
        """Bytes."""


class _KernelPeak:
    """Linux keeps the peak itself (VmHWM): exact but for the few pages that each thread counts for itself."""

    def reset(self) -> None:
        (PROC / "clear_refs").write_text(RESET_PEAK)

    def read(self) -> int:
        for line in (PROC / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise OSError(f"{PROC / 'status'}: has no VmHWM")


class _SampledPeak:
    """Elsewhere a thread looks again and again; what lasts less than its interval escapes it."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._sample, name="memory-meter", daemon=True).start()

    def reset(self) -> None:
        with self._lock:
            self._peak = self._process.memory_info().rss

    def read(self) -> int:
        with self._lock:
            self._peak = max(self._peak, self._process.memory_info().rss)
            return self._peak

    def close(self) -> None:
        self._ended.set()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLING_INTERVAL_S):
            self.read()


def _resident_peak() -> _Peak:
    kernel = _KernelPeak()
    try:
        kernel.reset()
        kernel.read()
    except OSError:  # no Linux, or a sandbox that does not let a process reset it
        return _SampledPeak()
    return kernel


def _find_malloc_trim() -> Callable[[int], int] | None:
    if os.name != "posix":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only


_malloc_trim = _find_malloc_trim()


def _trim_heap() -> None:
    """Give the heap's free pages back: glibc keeps them, and they would count for whatever comes next."""
    if _malloc_trim is not None:
        _malloc_trim(0)
