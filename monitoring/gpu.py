"""What a GPU is doing while a worker trains on it: memory, load, temperature and power.

In: the worker's device, and how often to look. Out: a :class:`GpuReading` at most that often, for a record of kind
"gpu" in metrics.jsonl. Memory of this process is counted by torch's allocator, the rest is asked of NVML through
nvidia-ml-py. Neither waits for the GPU. Without a GPU nothing is read, imported or written.

NVML may be absent, or go away with the GPU that it looks at: that is one warning, and from then on a reading has
torch's figures alone. What a model of GPU can't say at all (a MIG slice has no temperature) is left out without one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class GpuReading:
    """One look at a GPU. None: not known.

    Attributes:
        allocated_bytes: of this process, in tensors.
        reserved_bytes: of this process, held by torch's allocator, tensors included.
        peak_allocated_bytes: most that was ever in tensors, since the process started.
        utilization_percent: of the time lately (NVML: 1/6 s to 1 s) in which some kernel ran.
        memory_used_bytes: of the whole GPU, all processes.
        temperature_c: of the chip, degrees Celsius.
        power_w: that the board draws, watts.
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None

    def figures(self) -> dict[str, float]:
        """Those that are known, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class GpuMonitor:
    """Looks at one GPU, at most every so often.

    Args:
        device: what the worker computes on; anything but a GPU is never due.
        interval_s: seconds between readings at the least; 0 for none.
        clock: seconds; for tests.
    """

    def __init__(self, device: torch.device, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._interval_s = interval_s if device.type == "cuda" else 0.0
        self._clock = clock
        self._next_s = -math.inf
        self._nvml: _Nvml | None = None
        self._nvml_tried = False

    def due(self) -> bool:
        """Whether it is time for a reading. Costs nothing where there is no GPU."""
        return self._interval_s > 0 and self._clock() >= self._next_s

    def read(self, warn: Callable[[str], None]) -> GpuReading:
        """Look now.

        Args:
            warn: called once, with one line, when NVML can't be used or can't any more.
        """
        self._next_s = self._clock() + self._interval_s
        return GpuReading(
            allocated_bytes=torch.cuda.memory_allocated(self._device),
            reserved_bytes=torch.cuda.memory_reserved(self._device),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            **self._ask_nvml(warn),
        )

    def close(self) -> None:
        """Let go of NVML. May be called again."""
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def _ask_nvml(self, warn: Callable[[str], None]) -> dict[str, Any]:
        try:
            if not self._nvml_tried:
                self._nvml_tried = True
                self._nvml = _Nvml(self._device)
            return {} if self._nvml is None else self._nvml.read()
        except NvmlUnavailableError as error:
            self.close()
            warn(f"{self._device}: {error}; records of kind 'gpu' have torch's figures alone from here on")
            return {}


class NvmlUnavailableError(Exception):
    """NVML can't be used, or not for this GPU; the message says why."""


class _Nvml:
    """One GPU as NVML sees it.

    Raises:
        NvmlUnavailableError: nvidia-ml-py, the driver or the GPU is not there. So does :meth:`read`.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            import pynvml  # here: a machine without a GPU needs neither it nor the driver
        except ImportError as error:
            raise NvmlUnavailableError("nvidia-ml-py is not installed (pip install -r requirements.lock)") from error
        self._library = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NvmlUnavailableError(f"NVML can't be used ({error})") from error
        try:
            self._handle = self._find(device)
        except pynvml.NVMLError as error:
            self.close()
            raise NvmlUnavailableError(f"NVML does not know this GPU ({error})") from error
        self._figures: dict[str, Callable[[], float]] = {
            "utilization_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu,
            "memory_used_bytes": lambda: pynvml.nvmlDeviceGetMemoryInfo(self._handle).used,
            # Its successor, nvmlDeviceGetTemperatureV, is not in the drivers of CUDA 12.
            "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(self._handle, pynvml.NVML_TEMPERATURE_GPU),
            "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(self._handle) / 1000,
        }

    def read(self) -> dict[str, float]:
        """The figures that this GPU has."""
        found = {}
        for name, ask in list(self._figures.items()):
            try:
                found[name] = ask()
            except self._library.NVMLError as error:
                if error.value != self._library.NVML_ERROR_NOT_SUPPORTED:
                    raise NvmlUnavailableError(f"NVML failed ({error})") from error
                del self._figures[name]  # it will not learn to
        return found

    def close(self) -> None:
        """Undo nvmlInit."""
        try:
            self._library.nvmlShutdown()
        except self._library.NVMLError:
            return  # it went with the driver: there is nothing left to undo

    def _find(self, device: torch.device) -> Any:
        """By the GPU's own id: CUDA_VISIBLE_DEVICES numbers GPUs otherwise than NVML does."""
        uuid = torch.cuda.get_device_properties(device).uuid
        try:
            return self._library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except self._library.NVMLError as error:
            if error.value != self._library.NVML_ERROR_NOT_FOUND:
                raise
            return self._library.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
