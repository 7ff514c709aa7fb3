"""State of all GPUs of this machine, read through NVML, named as in :mod:`esmeray.monitoring.sampling.metric_names`.

All GPUs are read, whichever process uses them and whatever CUDA_VISIBLE_DEVICES is; indices are NVML's, as in
nvidia-smi. If NVML does not match its driver, or a GPU is lost during a run, one warning is logged and other GPUs are
still read. Metrics that a GPU does not support (a MIG slice has no load) are left out silently. No call waits for a
kernel. A reading of PCIe traffic blocks for 40 ms, so one GPU is read every :data:`PCIE_EVERY_S`, round robin.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from esmeray.monitoring.sampling.host import Rates

PCIE_EVERY_S = 5.0
"""Seconds between measurements of PCIe traffic, one GPU each."""

# NVML's bits of reasons for lowered clocks (nvmlClocksEventReason*).
THERMAL_REASONS = 0x020 | 0x040
"""Thermal slowdown, by the chip or by the driver."""
POWER_REASONS = 0x004 | 0x080
"""Power limits: of the board, or requested by the machine's power brake."""
SLOWDOWN = 0x008
"""Hardware slowdown: clocks are halved or lower; a bit of the two above usually gives the reason."""

_CANNOT_SAY = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,  # an older driver
    pynvml.NVML_ERROR_INVALID_ARGUMENT,  # a field unknown to the driver
)
_DRIVER_GONE = (
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
)
_LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, *_DRIVER_GONE)
_DRIVER_NODE = Path("/dev/nvidiactl")

Metrics = dict[str, float]


@dataclass(frozen=True)
class GpuSample:
    """One sample of a GPU, by NVML's index; metrics by the last part of their names."""

    index: int
    uuid: str
    metrics: Metrics


class NvmlDevices:
    """The GPUs of this machine, none if NVML can't be used; not thread-safe.

    ``warn`` is called with one line, once per cause. ``clock`` returns seconds; for tests.
    """

    def __init__(self, warn: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._warn, self._clock = warn, clock
        self._gpus: list[_Gpu] = []
        self._pcie_turns = -1
        self._pcie_next_s = clock()
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            # A machine without a GPU is fine; the driver's device file without a driver is an error.
            no_driver = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
            if error.value not in no_driver or _DRIVER_NODE.exists():
                warn(f"GPUs are not monitored: NVML can't be used ({error}); see 'esmeray profile gpu'")
            return
        for index in range(count):
            try:
                self._gpus.append(_Gpu(index, clock))
            except pynvml.NVMLError as error:
                warn(f"GPU {index} is not monitored: NVML can't open it ({error})")

    def read(self) -> list[GpuSample]:
        samples = []
        turn = self._pcie_turn()
        for gpu in list(self._gpus):  # a copy: a lost one is removed
            try:
                samples.append(gpu.read(pcie=gpu is turn))
            except pynvml.NVMLError as error:
                if error.value in _DRIVER_GONE:  # one warning for all GPUs
                    self._warn(f"NVML failed ({error}): GPUs are no longer monitored")
                    self._gpus.clear()
                    return []
                self._warn(f"GPU {gpu.index} can't be read ({error}) and is no longer monitored")
                self._gpus.remove(gpu)
        return samples

    def close(self) -> None:
        self._gpus.clear()
        # NVML may be uninitialised, or its driver unloaded.
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def _pcie_turn(self) -> "_Gpu | None":
        """Return the GPU whose PCIe traffic is measured now, if it is due."""
        now_s = self._clock()
        if not self._gpus or now_s < self._pcie_next_s - 0.1 * PCIE_EVERY_S:  # samples may come slightly early
            return None
        self._pcie_next_s = now_s + PCIE_EVERY_S
        self._pcie_turns += 1
        return self._gpus[self._pcie_turns % len(self._gpus)]  # round robin over the GPUs that are left


class _Gpu:
    """A GPU by its handle. Raises NVMLError if NVML can't open it."""

    def __init__(self, index: int, clock: Callable[[], float]) -> None:
        self.index = index
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._uuid = pynvml.nvmlDeviceGetUUID(self._handle)
        self._links = Rates(clock)
        nvml, handle, ecc = pynvml, self._handle, pynvml.nvmlDeviceGetTotalEccErrors
        self._questions: list[Callable[[], Metrics]] = [
            lambda: _fields(nvml.nvmlDeviceGetUtilizationRates(handle), util="gpu", mem_util="memory"),
            lambda: _fields(nvml.nvmlDeviceGetMemoryInfo(handle), mem_used_bytes="used", mem_total_bytes="total"),
            # Its successor, nvmlDeviceGetTemperatureV, is missing in the drivers of CUDA 12.
            lambda: {"temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)},
            lambda: {"power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000},
            lambda: {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000},
            lambda: {"sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)},
            lambda: {"sm_clock_max_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)},
            lambda: {"memory_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)},
            lambda: {"processes": len(nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))},
            lambda: {"ecc_corrected": ecc(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC)},
            lambda: {"ecc_uncorrected": ecc(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)},
            lambda: {"throttle_reasons": nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)},
            self._nvlink_traffic,
            self._pcie_traffic,
        ]

    def read(self, pcie: bool) -> GpuSample:
        """Read all metrics. Raises NVMLError if the GPU is lost, or nothing could be read."""
        metrics, failure = Metrics(), None
        for question in list(self._questions):
            if question == self._pcie_traffic and not pcie:
                continue
            try:
                metrics |= question()
            except pynvml.NVMLError as error:
                if error.value in _LOST:
                    raise
                if error.value in _CANNOT_SAY:  # unsupported: not read again
                    self._questions.remove(question)
                else:
                    failure = error  # possibly transient, e.g. a timeout
        if failure is not None and not metrics:  # nothing could be read: treat the GPU as lost, whatever the error
            raise failure
        return GpuSample(self.index, self._uuid, metrics)

    def _nvlink_traffic(self) -> Metrics:
        """Return the payload over all links; NVML counts it in KiB."""
        fields = {
            "nvlink_tx_bytes_per_s": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
            "nvlink_rx_bytes_per_s": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
        }
        # 0xFFFFFFFF: all links.
        values = pynvml.nvmlDeviceGetFieldValues(self._handle, [(field, 0xFFFFFFFF) for field in fields.values()])
        for value in values:  # the call may succeed while a field fails
            if value.nvmlReturn != pynvml.NVML_SUCCESS:
                raise pynvml.NVMLError(value.nvmlReturn)
        return self._links.of({name: value.value.ullVal * 1024.0 for name, value in zip(fields, values, strict=True)})

    def _pcie_traffic(self) -> Metrics:
        """Return PCIe traffic; NVML gives KB/s, counted during 20 ms."""
        ways = {
            "pcie_tx_bytes_per_s": pynvml.NVML_PCIE_UTIL_TX_BYTES,
            "pcie_rx_bytes_per_s": pynvml.NVML_PCIE_UTIL_RX_BYTES,
        }
        return {name: pynvml.nvmlDeviceGetPcieThroughput(self._handle, way) * 1000 for name, way in ways.items()}


def _fields(answer: Any, **fields: str) -> Metrics:
    """Return fields of an NVML structure, by the names of their metrics."""
    return {name: getattr(answer, field) for name, field in fields.items()}
