"""All GPUs are read with a simulated NVML: unsupported metrics are omitted, and a lost GPU causes one warning."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from esmeray.monitoring.sampling import nvml
from esmeray.monitoring.sampling.metric_names import METRICS
from esmeray.monitoring.sampling.nvml import PCIE_EVERY_S, NvmlDevices

METRIC_VALUES = {
    "util": 87,
    "mem_util": 31,
    "mem_used_bytes": 30,
    "mem_total_bytes": 100,
    "temperature_c": 61,
    "power_w": 350.5,
    "power_limit_w": 700.0,
    "throttle_reasons": 0x24,
    "processes": 2,
    "sm_clock_mhz": 1755,
    "sm_clock_max_mhz": 1980,
    "memory_clock_mhz": 2619,
    "ecc_corrected": 3,
    "ecc_uncorrected": 1,
}
ANSWERS = {
    "UUID": lambda gpu: f"GPU-{gpu:04d}",
    "UtilizationRates": lambda gpu: SimpleNamespace(gpu=87, memory=31),
    "MemoryInfo": lambda gpu: SimpleNamespace(total=100, free=70, used=30),
    "Temperature": lambda gpu, sensor: 61,
    "PowerUsage": lambda gpu: 350_500,
    "EnforcedPowerLimit": lambda gpu: 700_000,
    "ClockInfo": lambda gpu, clock: {pynvml.NVML_CLOCK_SM: 1755, pynvml.NVML_CLOCK_MEM: 2619}[clock],
    "MaxClockInfo": lambda gpu, clock: 1980,
    "CurrentClocksEventReasons": lambda gpu: 0x24,
    "TotalEccErrors": lambda gpu, kind, counter: {0: 3, 1: 1}[kind],
    "ComputeRunningProcesses_v3": lambda gpu: [10, 5],
    "PcieThroughput": lambda gpu, way: 5000 + way,
    "HandleByIndex": lambda gpu: gpu,
}


class Driver:
    """A simulated NVML that records its calls per GPU and fails with configured errors."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.init: int | None = None
        self.failing: dict[tuple[int, str] | str, int] = {}
        """Error codes by (GPU, function) or by function, nvmlDeviceGet left out."""
        self.calls: list[tuple[int, str]] = []
        self.links_kib = [1000, 500]
        self.open = 0
        self.warnings: list[str] = []

    def devices(self) -> NvmlDevices:
        return NvmlDevices(self.warnings.append, clock=lambda: self.now_s)

    def answer(self, function: str, gpu: int, *more: Any) -> Any:
        self.calls.append((gpu, function))
        code = self.failing.get((gpu, function)) or self.failing.get((gpu, "*")) or self.failing.get(function)
        if code is not None:
            raise pynvml.NVMLError(code)
        return ANSWERS[function](gpu, *more)

    def fields(self, gpu: int, wanted: list[tuple[int, int]]) -> list[SimpleNamespace]:
        assert [scope for _, scope in wanted] == [0xFFFFFFFF] * 2
        values = [SimpleNamespace(ullVal=kib) for kib in self.links_kib]
        return [SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=value) for value in values]

    def begin(self) -> None:
        if self.init is not None:
            raise pynvml.NVMLError(self.init)
        self.open += 1

    def end(self) -> None:
        if self.open == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        self.open -= 1


@pytest.fixture
def driver(monkeypatch) -> Driver:
    driver = Driver()
    functions = {f"DeviceGet{name}": partial(driver.answer, name) for name in ANSWERS}
    functions |= {"Init": driver.begin, "Shutdown": driver.end, "DeviceGetCount": lambda: 2}
    for name, function in (functions | {"DeviceGetFieldValues": driver.fields}).items():
        monkeypatch.setattr(pynvml, f"nvml{name}", function)
    return driver


def without_traffic(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "link" not in name and "pcie" not in name}


def test_all_gpus_are_read_and_every_metric_has_a_name(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    devices = driver.devices()
    samples = devices.read()
    assert [(sample.index, sample.uuid) for sample in samples] == [(0, "GPU-0000"), (1, "GPU-0001")]
    assert [without_traffic(sample.metrics) for sample in samples] == [METRIC_VALUES] * 2
    driver.now_s = PCIE_EVERY_S
    names = {f"gpu/{{gpu}}/{name}" for name in devices.read()[1].metrics}
    assert names == {metric.name for metric in METRICS if "{gpu}" in metric.name}
    assert driver.warnings == []


def test_unsupported_metrics_are_left_out_and_others_are_tried_again(driver):
    devices = driver.devices()
    unsupported = {(1, name): pynvml.NVML_ERROR_NOT_SUPPORTED for name in ("UtilizationRates", "TotalEccErrors")}  # MIG
    driver.failing = unsupported | {"PowerUsage": pynvml.NVML_ERROR_TIMEOUT}
    assert "power_w" not in devices.read()[0].metrics
    driver.failing = unsupported
    for _ in range(2):
        whole, mig_slice = (without_traffic(sample.metrics) for sample in devices.read())
        assert whole == METRIC_VALUES
        assert METRIC_VALUES.keys() - mig_slice.keys() == {"util", "mem_util", "ecc_corrected", "ecc_uncorrected"}
    assert driver.calls.count((1, "UtilizationRates")) == 1
    assert driver.warnings == []


def test_a_lost_gpu_is_one_warning_and_the_others_continue(driver):
    devices = driver.devices()
    devices.read()
    driver.failing = {(0, "*"): pynvml.NVML_ERROR_GPU_IS_LOST}
    assert [[sample.index for sample in devices.read()] for _ in range(3)] == [[1]] * 3
    assert driver.warnings == ["GPU 0 can't be read (GPU is lost) and is no longer monitored"]
    devices.close()
    assert driver.open == 0
    driver.failing = {}
    devices = driver.devices()
    driver.failing = {(gpu, "*"): pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH for gpu in range(2)}
    assert [devices.read() for _ in range(2)] == [[], []]
    assert len(driver.warnings) == 2 and "version mismatch" in driver.warnings[1]


def test_broken_driver_is_one_warning_and_a_missing_one_is_none(driver, monkeypatch, tmp_path):
    for code, node, warned in [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, tmp_path / "nvidiactl", False),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, tmp_path, True),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, tmp_path / "nvidiactl", True),
    ]:
        monkeypatch.setattr(nvml, "_DRIVER_NODE", node)
        driver.init = code
        devices = driver.devices()
        assert devices.read() == []
        assert ["profile gpu" in warning for warning in driver.warnings] == [True] * warned
        devices.close()
        assert driver.open == 0
        driver.warnings.clear()


def test_pcie_is_measured_for_one_gpu_at_a_time_in_turn(driver):
    devices = driver.devices()
    seen = []
    for driver.now_s in (0.0, 1.0, PCIE_EVERY_S, PCIE_EVERY_S + 1.0, 2 * PCIE_EVERY_S):
        seen.append([sample.metrics.get("pcie_rx_bytes_per_s") for sample in devices.read()])
    tx, rx = pynvml.NVML_PCIE_UTIL_TX_BYTES, pynvml.NVML_PCIE_UTIL_RX_BYTES
    measured, none = (5000.0 + rx) * 1000, None
    assert tx != rx
    assert seen == [[measured, none], [none, none], [none, measured], [none, none], [measured, none]]
    assert [gpu for gpu, function in driver.calls if "Pcie" in function] == [0, 0, 1, 1, 0, 0]
