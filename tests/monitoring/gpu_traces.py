"""Logs of simulated GPUs with known problems, sampled once a second.

A log starts with 20 s in which a model is loaded and ends with 10 s without work. In between, the GPUs have the problem
in the log's name. Noise is added with a fixed seed.
"""

from pathlib import Path

import numpy as np
import pandas as pd

START_S, END_S = 20, 10
TOTAL_MIB = 80 * 2**10
MAX_CLOCK_MHZ, LIMIT_W = 1980.0, 700.0
START_TIME = 1_750_000_000.0
IDLE, POWER_CAP, SW_THERMAL, HW_THERMAL = 0x1, 0x4, 0x20, 0x40


class Machine:
    """The state of G GPUs in each of S seconds, each (G, S); healthy until a test changes it."""

    def __init__(self, seconds: int = 300, gpus: int = 1) -> None:
        self.random = np.random.default_rng(0)
        self.working = slice(START_S, START_S + seconds)
        shape = (gpus, START_S + seconds + END_S)
        self.util = np.ones(shape)
        self.util[:, self.working] = 97
        self.memory = np.full(shape, 0.8)
        self.memory[:, :START_S] = 0.3
        self.temperature, self.power = np.full(shape, 64.0), np.full(shape, 600.0)
        self.clock = np.full(shape, MAX_CLOCK_MHZ)
        self.reasons, self.uncorrected = np.zeros(shape, int), np.zeros(shape, int)

    def idle(self, start: int, length: int) -> None:
        """Let the GPUs idle for ``length`` seconds, from second ``start`` of their work."""
        self.util[:, START_S + start : START_S + start + length] = 1

    def hot(self, gpu: int, start: int) -> None:
        """Let a GPU overheat from second ``start`` of its work on; its clock falls by a quarter."""
        when = slice(START_S + start, self.working.stop)
        self.temperature[gpu, when], self.clock[gpu, when], self.power[gpu, when] = 87, 0.75 * MAX_CLOCK_MHZ, 430
        self.reasons[gpu, when] = SW_THERMAL

    def write(self, path: Path) -> Path:
        """Write a log like ``nvidia-smi --query-gpu=... --format=csv``: a row per GPU and second."""
        shape = self.util.shape
        noise = self.random.normal
        idle = self.util < 10
        seconds = START_TIME + np.arange(shape[1]) + self.random.uniform(0, 0.02, shape[1])
        power_w = np.minimum(np.where(idle, 120, self.power) + noise(0, 6, shape), LIMIT_W * 1.005)
        columns = {
            "timestamp": np.broadcast_to(pd.to_datetime(seconds, unit="s").strftime("%Y/%m/%d %H:%M:%S.%f"), shape),
            "index": np.broadcast_to(np.arange(shape[0])[:, None], shape),
            "name": np.full(shape, "GPU with 80 GiB (made up)"),
            "utilization.gpu [%]": np.clip(self.util + noise(0, 2, shape), 0, 100).round(),
            "memory.used [MiB]": (self.memory * TOTAL_MIB + noise(0, 20, shape)).clip(0, TOTAL_MIB).round(),
            "memory.total [MiB]": np.full(shape, TOTAL_MIB),
            "temperature.gpu": (self.temperature + noise(0, 0.6, shape)).round(),
            "power.draw [W]": power_w.round(2),
            "enforced.power.limit [W]": np.full(shape, LIMIT_W),
            "clocks.current.sm [MHz]": self.clock - 15 * self.random.integers(0, 2, shape),
            "clocks.max.sm [MHz]": np.full(shape, MAX_CLOCK_MHZ),
            "clocks_event_reasons.active": np.vectorize("0x{:016x}".format)(np.where(idle, IDLE, self.reasons)),
            "ecc.errors.uncorrected.volatile.total": self.uncorrected,
        }
        pd.DataFrame({title: values.T.ravel() for title, values in columns.items()}).to_csv(path, index=False)
        return path


def healthy() -> Machine:
    """Two busy GPUs; a checkpoint takes two seconds."""
    machine = Machine(gpus=2)
    machine.idle(200, 2)
    return machine


def thermal() -> Machine:
    """One GPU that overheats in the second half."""
    machine = Machine()
    machine.hot(0, 150)
    return machine


def power() -> Machine:
    """One GPU at its power limit for two thirds of the time, with its clock lower by an eighth."""
    machine = Machine()
    when = slice(START_S + 100, machine.working.stop)
    machine.power[:, when], machine.clock[:, when], machine.reasons[:, when] = LIMIT_W - 1, 1725, POWER_CAP
    return machine


def waiting() -> Machine:
    """Two GPUs that wait for two of every ten seconds."""
    machine = Machine(gpus=2)
    for start in range(5, 295, 10):
        machine.idle(start, 2)
    return machine
