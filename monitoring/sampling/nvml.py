"""State of every GPU of this machine, from its driver: load, memory, temperature, power, clocks, traffic, errors.

GPUs are read whichever process uses them and whatever CUDA_VISIBLE_DEVICES is; indices are NVML's, as in
``nvidia-smi``.

NVML may be absent, not fit its driver, or lose a GPU in mid-run: that is one warning, and what is left is read on. What
a model of GPU can't say at all (one cut into MIG slices has no load) is left out without one. No call waits for a
kernel. Two of them, for PCIe traffic, take 20 ms each, in which the driver counts: they are made for one GPU at a
time, in turns, and no more often than :data:`PCIE_EVERY_S`: less than 1 % of a core, however many GPUs there are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from monitoring.sampling.host import Rates

PCIE_EVERY_S = 5.0
"""Seconds between measurements of PCIe traffic, of one GPU each."""

THROTTLE_REASONS: Mapping[int, str] = MappingProxyType(
    {
        0x001: "idle",
        0x002: "application clocks setting",
        0x004: "software power cap",
        0x008: "hardware slowdown",
        0x010: "sync boost",
        0x020: "software thermal slowdown",
        0x040: "hardware thermal slowdown",
        0x080: "hardware power brake",
        0x100: "display clock setting",
    }
)
"""NVML's bits (nvmlClocksEventReason*, earlier nvmlClocksThrottleReason*) in words."""
THERMAL_REASONS = 0x020 | 0x040
"""Too hot: the chip's own limit, or the driver's."""
POWER_REASONS = 0x004 | 0x080
"""Too much power: the board's limit, or what the machine asks for by its power brake."""
SLOWDOWN = 0x008
"""The hardware halves the clocks or worse; one of the bits above usually says why."""

_CANNOT_SAY = (
    "NVML_ERROR_NOT_SUPPORTED",
    "NVML_ERROR_NO_PERMISSION",
    "NVML_ERROR_FUNCTION_NOT_FOUND",
    "NVML_ERROR_INVALID_ARGUMENT",
)
_LOST = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED")
_DRIVER_GONE = ("NVML_ERROR_UNINITIALIZED", "NVML_ERROR_DRIVER_NOT_LOADED", "NVML_ERROR_LIB_RM_VERSION_MISMATCH")
_ALL_LINKS = 0xFFFFFFFF
_DRIVER_NODE = Path("/dev/nvidiactl")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"

Metrics = dict[str, float | int | None]


@dataclass(frozen=True)
class GpuSample:
    """One look at a GPU. None: not known, or not this time.

    Attributes:
        index: NVML's.
        uuid, name: of the GPU.
        util_percent: of the time lately (NVML: 1/6 s to 1 s) in which some kernel ran.
        mem_util_percent: of that time in which memory was read or written.
        mem_used_bytes, mem_total_bytes: of the whole GPU, all processes.
        temperature_c: of the chip, degrees Celsius.
        power_w, power_limit_w: that the board draws, and may draw.
        sm_clock_mhz, sm_clock_max_mhz, memory_clock_mhz: clocks now, and the highest of the SMs.
        throttle_reasons: bits of :data:`THROTTLE_REASONS`.
        pcie_tx_bytes_per_s, pcie_rx_bytes_per_s: during 20 ms; see the module for how often.
        nvlink_tx_bytes_per_s, nvlink_rx_bytes_per_s: over all links, since the last sample.
        ecc_corrected, ecc_uncorrected: memory errors since the driver was loaded.
        processes: that compute on it.
    """

    index: int
    uuid: str
    name: str
    util_percent: float | None = None
    mem_util_percent: float | None = None
    mem_used_bytes: int | None = None
    mem_total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle_reasons: int | None = None
    pcie_tx_bytes_per_s: float | None = None
    pcie_rx_bytes_per_s: float | None = None
    nvlink_tx_bytes_per_s: float | None = None
    nvlink_rx_bytes_per_s: float | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    processes: int | None = None

    def metrics(self) -> dict[str, float]:
        """Return the known values by name."""
        described = ("index", "uuid", "name")
        return {name: value for name, value in asdict(self).items() if name not in described and value is not None}


def describe_throttling(reasons: int) -> list[str]:
    """Return the bits that are set in words, but for those that lower no clock by force (idle, settings)."""
    forced = reasons & (THERMAL_REASONS | POWER_REASONS | SLOWDOWN)
    return [words for bit, words in THROTTLE_REASONS.items() if forced & bit]


class NvmlDevices:
    """The GPUs of this machine. Made by :meth:`open`; not for several threads at once."""

    def __init__(self, library: Any, warn: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._library = library
        self._warn = warn
        self._clock = clock
        self._gpus: list[_Gpu] = []
        self._pcie_turns = 0
        self._pcie_next_s = clock()

    @classmethod
    def open(cls, warn: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> NvmlDevices:
        """Find the GPUs.

        Args:
            warn: called with one line, once for each cause, when NVML can't be used or a GPU can't be read any more.
            clock: seconds; for tests.

        Returns:
            All GPUs; none where NVML can't be used, which is no cause for a warning on a machine that has no GPU.
        """
        try:
            import pynvml  # here: a machine without a GPU needs neither it nor the driver
        except ImportError:
            if _DRIVER_NODE.exists():
                warn("the GPUs are not watched: nvidia-ml-py is not installed (pip install -r requirements.lock)")
            return cls(None, warn, clock)
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            if _is_amiss(pynvml, error):
                warn(f"the GPUs are not watched: NVML can't be used ({error}); see 'python -m tools gpu_check'")
            return cls(None, warn, clock)
        devices = cls(pynvml, warn, clock)
        devices._find_gpus()
        return devices

    def read(self) -> list[GpuSample]:
        """Read all GPUs that still answer."""
        samples = []
        turn = self._pcie_turn()
        for gpu in list(self._gpus):
            try:
                samples.append(gpu.read(pcie=gpu is turn))
            except self._library.NVMLError as error:
                if error.value in _codes(self._library, _DRIVER_GONE):
                    self._warn(f"NVML failed ({error}): the GPUs are not watched from here on")
                    self._gpus.clear()
                    return []
                self._warn(f"GPU {gpu.index} can't be read any more ({error}) and is not watched from here on")
                self._gpus.remove(gpu)
        return samples

    def used_by(self, pids: Container[int]) -> set[int]:
        """Indices of the GPUs that any of these processes uses now, as far as NVML tells.

        It may not be permitted to, and processes of a container may go by the ids that they have outside of it: they
        are then found on no GPU.
        """
        return {gpu.index for gpu in self._gpus if gpu.is_used_by(pids)}

    def close(self) -> None:
        """Let go of NVML. May be called again."""
        self._gpus.clear()
        if self._library is not None:
            with contextlib.suppress(self._library.NVMLError):  # it went with the driver: nothing is left to undo
                self._library.nvmlShutdown()
            self._library = None

    def _find_gpus(self) -> None:
        library = self._library
        try:
            count = library.nvmlDeviceGetCount()
        except library.NVMLError as error:
            self._warn(f"the GPUs are not watched: NVML can't count them ({error})")
            return
        for index in range(count):
            try:
                self._gpus.append(_Gpu(library, index, self._clock))
            except library.NVMLError as error:
                self._warn(f"GPU {index} is not watched: NVML can't open it ({error})")

    def _pcie_turn(self) -> _Gpu | None:
        """The GPU whose PCIe traffic is measured now, if it is time."""
        now_s = self._clock()
        if not self._gpus or now_s < self._pcie_next_s - 0.1 * PCIE_EVERY_S:  # samples may come slightly early
            return None
        self._pcie_next_s = now_s + PCIE_EVERY_S
        self._pcie_turns += 1
        return self._gpus[(self._pcie_turns - 1) % len(self._gpus)]


class _Gpu:
    """One GPU by its handle. Raises NVMLError where NVML can't open it."""

    def __init__(self, library: Any, index: int, clock: Callable[[], float]) -> None:
        self.index = index
        self._library = library
        self._handle = library.nvmlDeviceGetHandleByIndex(index)
        self._uuid = library.nvmlDeviceGetUUID(self._handle)
        self._name = library.nvmlDeviceGetName(self._handle)
        self._links = Rates(clock)
        self._questions = self._all_questions()

    def read(self, pcie: bool) -> GpuSample:
        """Ask everything; what the GPU does not support is asked once only. PCIe traffic takes 40 ms.

        Raises:
            NVMLError: the GPU is lost, or nothing could be read of it.
        """
        library, found, failure = self._library, Metrics(), None
        for name, question in list(self._questions.items()):
            if name == "pcie" and not pcie:
                continue
            try:
                found |= question()
            except library.NVMLError as error:
                if error.value in _codes(library, _CANNOT_SAY):
                    del self._questions[name]
                elif error.value in _codes(library, _LOST + _DRIVER_GONE):
                    raise
                else:
                    failure = error  # a timeout, say: it may be better next time
            except AttributeError:
                del self._questions[name]  # not in this version of nvidia-ml-py
        if failure is not None and not found:
            raise failure
        return GpuSample(self.index, self._uuid, self._name, **found)  # type: ignore[arg-type]

    def is_used_by(self, pids: Container[int]) -> bool:
        """Test whether any of these processes computes on it, by MPS or without, or draws."""
        for use in ("Compute", "MPSCompute", "Graphics"):
            try:
                running = getattr(self._library, f"nvmlDeviceGet{use}RunningProcesses_v3")(self._handle)
            except (self._library.NVMLError, AttributeError):
                continue  # not told of this GPU, or not by this version of nvidia-ml-py
            if any(process.pid in pids for process in running):
                return True
        return False

    def _all_questions(self) -> dict[str, Callable[[], Metrics]]:
        nvml, handle = self._library, self._handle
        return {
            "load": self._load,
            "memory": self._memory,
            # Its successor, nvmlDeviceGetTemperatureV, is not in the drivers of CUDA 12.
            "temperature": lambda: {"temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)},
            "power": lambda: {"power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000},
            "power_limit": lambda: {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000},
            "sm_clock": lambda: {"sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)},
            "sm_clock_max": lambda: {"sm_clock_max_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)},
            "memory_clock": lambda: {"memory_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)},
            "throttling": self._throttling,
            "nvlink": self._nvlink_traffic,
            "pcie": self._pcie_traffic,
            "ecc": self._ecc,
            "processes": lambda: {"processes": len(nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))},
        }

    def _load(self) -> Metrics:
        rates = self._library.nvmlDeviceGetUtilizationRates(self._handle)
        return {"util_percent": rates.gpu, "mem_util_percent": rates.memory}

    def _memory(self) -> Metrics:
        memory = self._library.nvmlDeviceGetMemoryInfo(self._handle)
        return {"mem_used_bytes": memory.used, "mem_total_bytes": memory.total}

    def _throttling(self) -> Metrics:
        """Throttle reasons by the present name, or by that of drivers before CUDA 12.2."""
        nvml = self._library
        try:
            return {"throttle_reasons": nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)}
        except nvml.NVMLError_FunctionNotFound:
            return {"throttle_reasons": nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)}

    def _ecc(self) -> Metrics:
        nvml, handle = self._library, self._handle
        since_load = nvml.NVML_VOLATILE_ECC
        corrected, uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return {
            "ecc_corrected": nvml.nvmlDeviceGetTotalEccErrors(handle, corrected, since_load),
            "ecc_uncorrected": nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, since_load),
        }

    def _nvlink_traffic(self) -> Metrics:
        """Payload over all links; NVML counts it in KiB."""
        nvml = self._library
        fields = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        sent, received = nvml.nvmlDeviceGetFieldValues(self._handle, [(field, _ALL_LINKS) for field in fields])
        for value in (sent, received):
            if value.nvmlReturn != nvml.NVML_SUCCESS:
                raise nvml.NVMLError(value.nvmlReturn)
        counters = {"nvlink_tx_bytes_per_s": sent, "nvlink_rx_bytes_per_s": received}
        rates = self._links.of({name: value.value.ullVal * 1024.0 for name, value in counters.items()})
        return Metrics(rates)

    def _pcie_traffic(self) -> Metrics:
        """NVML gives KB/s."""
        nvml, handle = self._library, self._handle
        return {
            "pcie_tx_bytes_per_s": nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES) * 1000,
            "pcie_rx_bytes_per_s": nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES) * 1000,
        }


def _is_amiss(library: Any, error: Any) -> bool:
    """Test whether NVML should work here: not without a GPU, nor in a container that was given none."""
    if error.value == library.NVML_ERROR_LIBRARY_NOT_FOUND:
        return _DRIVER_NODE.exists()
    if error.value == library.NVML_ERROR_DRIVER_NOT_LOADED:  # its library is in many a machine image
        return any(_text(vendor) == _NVIDIA for vendor in _PCI_DEVICES.glob("*/vendor"))
    return True


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _codes(library: Any, names: tuple[str, ...]) -> set[int]:
    return {getattr(library, name) for name in names}
