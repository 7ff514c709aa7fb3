"""Memory that a worker needs, and memory that there is, on a GPU or on the CPU.

On a GPU torch's allocator knows both. On the CPU the resident memory of the whole process is measured; a limit stands
in for a device's memory. Linux keeps the peak (VmHWM): exact but for the few pages that each thread counts for itself.
Where a sandbox does not let a process reset it, the memory in use at the time of reading stands in.
"""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from esmeray.monitoring.sampling.host import memory_of_this_machine

PROC = Path("/proc/self")


class MemoryMeter:
    """Peak and total memory of what a worker computes on.

    On the CPU the kernel keeps one peak for a process: meters of the same process reset each other's. ``limit_bytes``
    counts there alone: resident memory beyond which :meth:`check` raises.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._limit_bytes = None if self._cuda else limit_bytes
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget what was needed so far; the peak is now what is in use."""
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            return
        try:
            (PROC / "clear_refs").write_text("5")  # sets the peak to the present value (Linux 4.0, man 5 proc)
            self._kernel_keeps_peak = True
        except OSError:
            self._kernel_keeps_peak = False

    def forget_peak(self) -> None:
        """Keep the peak of an evaluation or a checkpoint from counting as a step's, where a limit is checked."""
        if self._limit_bytes is not None:
            self.reset_peak()

    def peak_bytes(self) -> int:
        """Most memory in use since :meth:`reset_peak`.

        On CUDA what torch had reserved; on the CPU the resident memory of the process with its code and libraries.
        """
        if self._cuda is not None:
            # Not what was allocated: fragments between tensors are as lost to the device as the tensors.
            return torch.cuda.max_memory_reserved(self._cuda)
        if not self._kernel_keeps_peak:  # VmHWM would be of the process's whole life
            return psutil.Process().memory_info().rss
        (line,) = (line for line in (PROC / "status").read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    def total_bytes(self) -> int:
        """Memory of the GPU; on the CPU the limit, else what this machine has or its container may use."""
        return (
            torch.cuda.mem_get_info(self._cuda)[1]
            if self._cuda is not None
            else self._limit_bytes or memory_of_this_machine().total
        )

    def check(self) -> None:
        """Raise torch.OutOfMemoryError where the peak passed the limit. On a GPU the allocator raises it."""
        if self._limit_bytes is not None and (peak := self.peak_bytes()) > self._limit_bytes:
            taken, limit = (f"{size_bytes / 2**20:,.0f} MiB" for size_bytes in (peak, self._limit_bytes))
            raise torch.OutOfMemoryError(f"the process took {taken} of memory, {limit} is what it may take")

    def free(self) -> None:
        """Give back what nothing holds any more, and reset the peak."""
        gc.collect()  # first: tensors in cycles (a traceback's frames) hold memory that the allocators can't give back
        if self._cuda is not None:
            torch.cuda.empty_cache()
        elif _malloc_trim is not None:
            _malloc_trim(0)
        self.reset_peak()


# Only glibc has it; it keeps pages that would count for whatever comes next.
_malloc_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
