"""A GPU is looked at no more often than asked; without NVML, or without a GPU, the run goes on. NVML is faked."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pynvml
import pytest
import torch

from monitoring.gpu import GpuMonitor, GpuReading

GPU = torch.device("cuda", 1)
TORCH_ALONE = GpuReading(allocated_bytes=10, reserved_bytes=20, peak_allocated_bytes=15)


class Driver:
    """What the faked NVML answers: a value, or an error code to fail with."""

    def __init__(self) -> None:
        self.init: int | None = None
        self.utilization: float | int = 87
        self.temperature = 61
        self.power_mw: int = 350_500
        self.lost = False
        self.unsupported: set[str] = set()
        self.asked: list[str] = []
        self.open = 0

    def answer(self, name: str, value):
        self.asked.append(name)
        if self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if name in self.unsupported:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value


@pytest.fixture
def driver(monkeypatch) -> Driver:
    """A GPU of which torch and NVML know."""
    driver = Driver()

    def init():
        if driver.init is not None:
            raise pynvml.NVMLError(driver.init)
        driver.open += 1

    def shut_down():
        driver.open -= 1

    def find(uuid):
        if uuid != "GPU-0123":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return driver.answer("handle", uuid)

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 15)
    uuids = {0: "ffff", 1: "0123"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index]))
    monkeypatch.setattr(pynvml, "nvmlInit", init)
    monkeypatch.setattr(pynvml, "nvmlShutdown", shut_down)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", find)
    answers = {
        "nvmlDeviceGetUtilizationRates": lambda: SimpleNamespace(gpu=driver.utilization, memory=3),
        "nvmlDeviceGetMemoryInfo": lambda: SimpleNamespace(total=100, free=70, used=30),
        "nvmlDeviceGetTemperature": lambda: driver.temperature,
        "nvmlDeviceGetPowerUsage": lambda: driver.power_mw,
    }
    for name, value in answers.items():
        monkeypatch.setattr(pynvml, name, lambda handle, *sensor, name=name, value=value: driver.answer(name, value()))
    return driver


@pytest.fixture
def warnings() -> list[str]:
    return []


def test_reading_has_what_torch_and_nvml_say(driver, warnings):
    reading = GpuMonitor(GPU, 1.0).read(warnings.append)
    assert reading.figures() == {
        "allocated_bytes": 10,
        "reserved_bytes": 20,
        "peak_allocated_bytes": 15,
        "utilization_percent": 87,
        "memory_used_bytes": 30,
        "temperature_c": 61,
        "power_w": 350.5,
    }
    assert warnings == []


def test_it_is_due_at_once_and_then_no_more_often_than_asked(driver, warnings):
    now = 100.0
    monitor = GpuMonitor(GPU, 5.0, clock=lambda: now)
    readings = []
    for now in (100.0, 101.0, 104.9, 105.0, 106.0, 120.0, 121.0):
        if monitor.due():
            monitor.read(warnings.append)
            readings.append(now)
    assert readings == [100.0, 105.0, 120.0]


@pytest.mark.parametrize(("device", "interval_s"), [(torch.device("cpu"), 1e-9), (GPU, 0.0)])
def test_without_a_gpu_or_an_interval_it_is_never_due(device, interval_s, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it would fail
    monitor = GpuMonitor(device, interval_s)
    assert not monitor.due()
    monitor.close()


def test_lost_gpu_is_one_warning_and_torch_goes_on(driver, warnings):
    monitor = GpuMonitor(GPU, 1.0)
    assert monitor.read(warnings.append).temperature_c == 61
    driver.lost = True
    asked = len(driver.asked)
    assert [monitor.read(warnings.append) for _ in range(3)] == [TORCH_ALONE] * 3
    assert len(driver.asked) == asked + 1
    assert driver.open == 0
    (warning,) = warnings
    assert warning == (
        "cuda:1: NVML failed (GPU is lost); records of kind 'gpu' have torch's figures alone from here on"
    )


def test_what_a_gpu_cannot_say_is_left_out_and_not_asked_again(driver, warnings):
    driver.unsupported = {"nvmlDeviceGetTemperature"}
    monitor = GpuMonitor(GPU, 1.0)
    for _ in range(2):
        figures = monitor.read(warnings.append).figures()
        assert "temperature_c" not in figures
        assert figures["power_w"] == 350.5
    assert driver.asked.count("nvmlDeviceGetTemperature") == 1
    assert warnings == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"),
    ],
)
def test_missing_driver_is_one_warning(driver, warnings, code, reason):
    driver.init = code
    monitor = GpuMonitor(GPU, 1.0)
    assert [monitor.read(warnings.append) for _ in range(2)] == [TORCH_ALONE] * 2
    (warning,) = warnings
    assert f"NVML can't be used ({reason})" in warning
    monitor.close()
    assert driver.open == 0


def test_missing_package_is_one_warning_that_says_how_to_get_it(driver, warnings, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monitor = GpuMonitor(GPU, 1.0)
    assert [monitor.read(warnings.append) for _ in range(2)] == [TORCH_ALONE] * 2
    (warning,) = warnings
    assert "pip install" in warning


def test_gpu_that_nvml_does_not_know_is_one_warning(driver, warnings):
    monitor = GpuMonitor(torch.device("cuda", 0), 1.0)
    assert monitor.read(warnings.append) == TORCH_ALONE
    assert "NVML does not know this GPU (Not Found)" in warnings[0]
    assert driver.open == 0


def test_closing_lets_go_of_nvml_and_may_be_repeated(driver, warnings):
    monitor = GpuMonitor(GPU, 1.0)
    monitor.read(warnings.append)
    assert driver.open == 1
    monitor.close()
    monitor.close()
    assert driver.open == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_can_be_read(warnings):
    monitor = GpuMonitor(torch.device("cuda", 0), 1.0)
    held = torch.ones(1 << 20, device="cuda")
    reading = monitor.read(warnings.append)
    monitor.close()
    assert held.numel() * 4 <= reading.allocated_bytes <= reading.reserved_bytes
    assert warnings == []
