"""Memory used by a worker and memory available, on a GPU or on the CPU.

On a GPU, torch's allocator knows both. On the CPU, the resident memory of the whole process is measured, and a limit
takes the role of the device's memory. The peak is Linux' VmHWM, exact except for a few pages per thread. If a sandbox
does not allow resetting it, the current memory is reported in its place.
"""

import gc
from pathlib import Path

import psutil
import torch

from esmeray.common.processor import give_back_memory
from esmeray.monitoring.sampling.host import memory_of_this_machine

PROC = Path("/proc/self")


class MemoryMeter:
    """Peak and total memory of a worker's device.

    On the CPU the kernel keeps one peak per process: meters of the same process reset each other. ``limit_mib``
    applies to the CPU only: resident memory in MiB beyond which :meth:`check` raises.
    """

    def __init__(self, device: torch.device, limit_mib: float | None = None) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._limit_bytes = None if self._cuda or limit_mib is None else int(limit_mib * 2**20)
        self.reset_peak()

    def reset_peak(self) -> None:
        """Reset the peak to the memory in use now."""
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            return
        try:
            (PROC / "clear_refs").write_text("5")  # sets the peak to the present value (Linux 4.0, man 5 proc)
            self._kernel_keeps_peak = True
        except OSError:
            self._kernel_keeps_peak = False

    def forget_peak(self) -> None:
        """Exclude an evaluation or a checkpoint from the peak of a step, if a limit is checked."""
        if self._limit_bytes is not None:
            self.reset_peak()

    def peak_bytes(self) -> int:
        """Return the maximum memory in use since :meth:`reset_peak`.

        On CUDA this is torch's reserved memory; on the CPU the resident memory of the process with code and libraries.
        """
        if self._cuda is not None:
            # Reserved, not allocated: fragments between tensors are unavailable to the device too.
            return torch.cuda.max_memory_reserved(self._cuda)
        if not self._kernel_keeps_peak:  # VmHWM then covers the process's whole life
            return psutil.Process().memory_info().rss
        (line,) = (line for line in (PROC / "status").read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    def total_bytes(self) -> int:
        """Return the memory of the GPU; on the CPU the limit, otherwise the memory of the machine or its container."""
        return (
            torch.cuda.mem_get_info(self._cuda)[1]
            if self._cuda is not None
            else self._limit_bytes or memory_of_this_machine().total
        )

    def check(self) -> None:
        """Raise torch.OutOfMemoryError if the peak exceeds the limit. On a GPU the allocator raises it."""
        if self._limit_bytes is not None and (peak := self.peak_bytes()) > self._limit_bytes:
            taken, limit = (f"{size_bytes / 2**20:,.0f} MiB" for size_bytes in (peak, self._limit_bytes))
            raise torch.OutOfMemoryError(f"the process used {taken} of memory, more than its limit of {limit}")

    def free(self) -> None:
        """Release unused memory to the system, and reset the peak."""
        # first: tensors in reference cycles (frames of a traceback) keep memory that the allocators can't release
        gc.collect()
        if self._cuda is not None:
            torch.cuda.empty_cache()
        else:
            give_back_memory()
        self.reset_peak()
