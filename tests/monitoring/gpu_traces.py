"""Logs of GPUs whose trouble is known, sampled once a second and written by the project's own writer.

A trace begins with 20 s in which a model loads, ends with 10 s in which nothing runs, and has in between what its name
says. All are noisy, by a seed. No GPU was measured for them.

docs/img/gpu_analysis.png is made of the one with several troubles:
  python -m tests.monitoring.gpu_traces made_up_trace.csv
  python -m tools analyze_gpu_logs --log made_up_trace.csv --output docs/img/gpu_analysis.png
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from monitoring.gpu_log.reader import GpuLogWriter
from monitoring.sampling.nvml import GpuSample

Floats = NDArray[np.float64]

START_S, END_S = 20, 10
TOTAL_BYTES = 80 * 2**30
MAX_CLOCK_MHZ, LIMIT_W = 1980.0, 700.0
START_TIME = 1_750_000_000.0
IDLE, POWER_CAP, SW_THERMAL, HW_THERMAL = 0x1, 0x4, 0x20, 0x40


class Machine:
    """What every second looks like on one machine; a healthy one to begin with.

    Args:
        seconds: that the GPUs work.
        gpus: how many.
        seed: of the noise.
    """

    def __init__(self, seconds: int = 600, gpus: int = 1, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.seconds = START_S + seconds + END_S
        self.working = slice(START_S, START_S + seconds)
        self.busy = np.zeros((gpus, self.seconds), bool)
        self.busy[:, self.working] = True
        self.memory = np.full((gpus, self.seconds), 0.80)
        self.memory[:, :START_S] = np.linspace(0.01, 0.3, START_S)
        self.memory[:, -END_S:] = 0.01
        self.temperature = np.full((gpus, self.seconds), 64.0)
        self.clock = np.full((gpus, self.seconds), MAX_CLOCK_MHZ)
        self.power = np.full((gpus, self.seconds), 600.0)
        self.reasons = np.zeros((gpus, self.seconds), int)
        self.cpu = np.full(self.seconds, 30.0)
        self.disk_write = np.full(self.seconds, 1e6)
        self.disk_read = np.full(self.seconds, 5e6)
        self.uncorrected = np.zeros((gpus, self.seconds), int)

    def idle(self, gpu: int | slice, start: float, length: int) -> slice:
        """Let GPUs wait from a second of their work on. Returns these seconds."""
        when = slice(START_S + int(start), START_S + int(start) + length)
        self.busy[gpu, when] = False
        return when

    def samples(self) -> Mapping[str, Floats]:
        """The figures with noise, each (gpus, seconds) or (seconds,)."""
        noise = self.random.normal
        shape = self.busy.shape
        idle = ~self.busy
        power = np.where(idle, 120.0, self.power) + noise(0, 6, shape)
        return {
            "util": np.clip(np.where(idle, 1.0, 97.0) + noise(0, 2, shape), 0, 100).round(),
            "memory": (self.memory * TOTAL_BYTES + noise(0, 2e7, shape)).clip(0, TOTAL_BYTES).round(),
            "temperature": (np.where(idle, self.temperature - 6, self.temperature) + noise(0, 0.6, shape)).round(),
            "power": np.minimum(power, LIMIT_W * 1.005),
            "clock": np.where(idle, 1980.0, self.clock) - 15 * self.random.integers(0, 2, shape),
            "reasons": np.where(idle, IDLE, self.reasons),
            "cpu": (self.cpu + noise(0, 3, self.seconds)).clip(0, 100),
            "disk_write": self.disk_write * self.random.lognormal(0, 0.4, self.seconds),
            "disk_read": self.disk_read * self.random.lognormal(0, 0.4, self.seconds),
        }

    def write(self, path: Path) -> Path:
        """Log it."""
        figures = self.samples()
        with GpuLogWriter(path) as writer:
            for second in range(self.seconds):
                host = {
                    "cpu_percent": figures["cpu"][second],
                    "host_total_bytes": 512 * 2**30,
                    "host_available_bytes": 400 * 2**30,
                    "host_used_bytes": 112 * 2**30,
                    "disk_read_bytes_per_s": figures["disk_read"][second],
                    "disk_write_bytes_per_s": figures["disk_write"][second],
                    "net_sent_bytes_per_s": 2e5,
                    "net_received_bytes_per_s": 3e5,
                }
                gpus = [self._gpu(figures, gpu, second) for gpu in range(len(self.busy))]
                writer.append(START_TIME + second + self.random.uniform(0, 0.02), "node", host, gpus)
        return path

    def _gpu(self, figures: Mapping[str, Floats], gpu: int, second: int) -> GpuSample:
        return GpuSample(
            index=gpu,
            uuid=f"GPU-{gpu:04d}",
            name="GPU with 80 GiB (made up)",
            util_percent=float(figures["util"][gpu, second]),
            mem_util_percent=float(figures["util"][gpu, second]) / 2,
            mem_used_bytes=int(figures["memory"][gpu, second]),
            mem_total_bytes=TOTAL_BYTES,
            temperature_c=float(figures["temperature"][gpu, second]),
            power_w=float(figures["power"][gpu, second]),
            power_limit_w=LIMIT_W,
            sm_clock_mhz=float(figures["clock"][gpu, second]),
            sm_clock_max_mhz=MAX_CLOCK_MHZ,
            memory_clock_mhz=2619.0,
            throttle_reasons=int(figures["reasons"][gpu, second]),
            ecc_corrected=0,
            ecc_uncorrected=int(self.uncorrected[gpu, second]),
            processes=1,
        )


def healthy(seed: int = 0) -> Machine:
    """Two GPUs at work; a checkpoint after ten minutes takes two seconds."""
    machine = Machine(900, gpus=2, seed=seed)
    when = machine.idle(slice(None), 600, 2)
    machine.disk_write[when] = 1.2e9
    return machine


def thermal(seed: int = 0) -> Machine:
    """From the middle on it is too hot, and its clocks fall by a quarter."""
    machine = Machine(seed=seed)
    when = slice(START_S + 300, machine.working.stop)
    machine.temperature[:, START_S : START_S + 300] = np.linspace(64, 86, 300)
    machine.temperature[:, when] = 87
    machine.clock[:, when] = 1485
    machine.power[:, when] = 430
    machine.reasons[:, when] = SW_THERMAL
    return machine


def power(seed: int = 0) -> Machine:
    """Two thirds of the time it draws what its limit allows, and its clocks fall by an eighth."""
    machine = Machine(seed=seed)
    when = slice(START_S + 200, machine.working.stop)
    machine.power[:, when] = LIMIT_W - 1
    machine.temperature[:, when] = 74
    machine.clock[:, when] = 1725
    machine.reasons[:, when] = POWER_CAP
    return machine


def loader(seed: int = 0) -> Machine:
    """Every few seconds, irregularly, both GPUs wait a second or three for CPUs that are full."""
    machine = Machine(gpus=2, seed=seed)
    place = 5
    while place < 590:
        when = machine.idle(slice(None), place, int(machine.random.integers(1, 4)))
        machine.cpu[when] = 92
        place += int(machine.random.integers(4, 12))
    return machine


def checkpoint(seed: int = 0) -> Machine:
    """Every 100 s it stops for 8 s, in which a gigabyte a second is written."""
    machine = Machine(1200, gpus=2, seed=seed)
    for place in range(90, 1190, 100):
        when = machine.idle(slice(None), place + int(machine.random.integers(-1, 2)), 8)
        machine.disk_write[when] = 1.1e9
    return machine


def sync(seed: int = 0) -> Machine:
    """Two GPUs take turns: one waits two or three seconds while the other works."""
    machine = Machine(gpus=2, seed=seed)
    place, turn = 3, 0
    while place < 590:
        length = int(machine.random.integers(2, 4))
        machine.idle(turn, place, length)
        place, turn = place + length + int(machine.random.integers(2, 5)), 1 - turn
    return machine


def leak(seed: int = 0) -> Machine:
    """Memory grows from a half to nine tenths, with a validation's peak every 100 s."""
    machine = Machine(1200, seed=seed)
    count = machine.working.stop - START_S
    machine.memory[:, machine.working] = np.linspace(0.5, 0.9, count)
    for place in range(100, 1200, 100):
        machine.memory[:, START_S + place : START_S + place + 6] += 0.03
    return machine


def troubled(seed: int = 0) -> Machine:
    """Everything at once on two GPUs, for a picture: a slow loader at first, checkpoints, heat on one, and a leak."""
    machine = Machine(1500, gpus=2, seed=seed)
    place = 5
    while place < 400:
        when = machine.idle(slice(None), place, int(machine.random.integers(1, 4)))
        machine.cpu[when] = 94
        place += int(machine.random.integers(4, 14))
    for place in range(240, 1500, 240):
        machine.disk_write[machine.idle(slice(None), place, 11)] = 1.4e9
    machine.memory[:, machine.working] = np.linspace(0.62, 0.92, 1500)
    warming, hot = slice(START_S + 400, START_S + 820), slice(START_S + 820, machine.working.stop)
    machine.temperature[1, warming], machine.temperature[1, hot] = np.linspace(64, 85, 420), 87
    machine.clock[1, hot], machine.power[1, hot], machine.reasons[1, hot] = 1440, 410, SW_THERMAL
    return machine


TRACES: Mapping[str, tuple[Callable[[int], Machine], set[str]]] = {
    "healthy": (healthy, set()),
    "thermal": (thermal, {"thermal_throttling"}),
    "power": (power, {"power_throttling"}),
    "loader": (loader, {"loader_gaps"}),
    "checkpoint": (checkpoint, {"checkpoint_gaps"}),
    "sync": (sync, {"sync_gaps"}),
    "leak": (leak, {"memory_leak"}),
}
"""Each trace with what is to be found in it, on each of its GPUs."""

if __name__ == "__main__":
    troubled().write(Path(sys.argv[1]))
