"""Peak memory of the steps of a training, beside what the process held when model and optimizer were built.

On CUDA it is what torch has allocated on the device; on the CPU the resident set of the process, whose peak Linux
keeps (``VmHWM``) and lets a process reset (proc(5), ``clear_refs``), and what its loader processes hold for themselves.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import psutil
import torch

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


class MemoryMeter:
    """Peak and starting point of this process."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.built_bytes = 0

    def start(self) -> None:
        """Model and optimizer are built: forget the peak so far, which building them made."""
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.built_bytes = torch.cuda.memory_allocated()
            return
        ctypes.CDLL(None).malloc_trim(0)  # what building left behind must not hide what the steps take
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        self.built_bytes = _status_bytes("VmRSS")

    @property
    def peak_bytes(self) -> int:
        """Highest since :meth:`start`."""
        if self._cuda:
            return torch.cuda.max_memory_allocated()
        return _status_bytes("VmHWM") + sum(child.memory_full_info().uss for child in psutil.Process().children())


def _status_bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
