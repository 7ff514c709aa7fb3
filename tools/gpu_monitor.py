"""Log this machine's GPUs to a CSV file, whatever uses them.

Writes a row for each GPU and sample, with what the machine does at that moment: load, memory, temperature, power,
clocks, throttle reasons and traffic of the GPU; CPUs, memory, disk and network of the machine. Each sample is written
at once and whole. Without a GPU the rows are the machine's own. Ctrl-C ends it, with a summary.

An existing log is appended to. 'python -m tools analyze_gpu_logs' summarises and draws a log.

Examples:
  python -m tools gpu_monitor
  python -m tools gpu_monitor --output run.csv --interval 0.5 --duration 600
  python -m tools gpu_monitor --pid 4242      # and what it takes itself; ends with it
"""

from __future__ import annotations

import math
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from pydantic import Field, PositiveFloat
from rich.console import Console
from rich.live import Live
from rich.text import Text

from common.arguments import ToolArguments, parse
from common.errors import ConfigError
from common.text import counted
from monitoring.gpu_log.writer import GpuLogWriter
from monitoring.sampling.host import HostSampler, ProcessSampler
from monitoring.sampling.nvml import GpuSample, NvmlDevices

_GIB = 2.0**30


class Arguments(ToolArguments):
    """Processes and GPUs to log, and for how long."""

    output: Path = Field(Path("gpu_log.csv"), description="The CSV file; appended to if it is there.")
    interval: float = Field(
        1.0, ge=0.05, description="Seconds between samples; GPUs measure no faster than every 0.05."
    )
    duration: PositiveFloat | None = Field(None, description="Seconds after which to end. Default: at Ctrl-C.")
    pid: list[int] = Field(
        [],
        description=(
            "Processes to watch: what they and those that they start take is logged too; when all have ended, so does "
            "this."
        ),
    )
    gpu: list[int] = Field([], description="Numbers of the GPUs to log, as nvidia-smi shows them. Default: all.")


def main(argv: list[str]) -> int:
    """Sample until Ctrl-C, SIGTERM, or the end of what is watched."""
    arguments = parse(Arguments, argv, "gpu_monitor", __doc__)
    session = _Session(arguments)
    code = 0
    try:
        with GpuLogWriter(arguments.output) as log, _live() as live:
            session.run(log, live)
    except KeyboardInterrupt:
        pass
    except SystemExit as end:  # SIGTERM, see tools.__main__
        code = int(end.code or 0)
    finally:
        session.devices.close()
    print(session.summary())
    return code


class _Session:
    """One call's samples."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._watched = ProcessSampler([_process(pid) for pid in arguments.pid])
        self.devices = NvmlDevices(_warn)
        self._host = HostSampler()
        self._name = socket.gethostname()
        self._samples = 0
        self._begun = time.monotonic()
        self._gpus = [gpu.index for gpu in self.devices.read()]
        if absent := sorted(set(arguments.gpu) - set(self._gpus)):
            numbers = ", ".join(map(str, self._gpus)) or "none"
            raise ConfigError(f"--gpu {' '.join(map(str, absent))}: not on this machine; there are: {numbers}")
        if not self._gpus:
            _warn("no GPU here: rows have the machine's own metrics alone")
        self._gpus = arguments.gpu or self._gpus

    def run(self, log: GpuLogWriter, live: Live | None) -> None:
        """Sample at once, and then every so often by the clock, until there is nothing left to do."""
        interval, duration = self._arguments.interval, self._arguments.duration or math.inf
        while not self._arguments.pid or self._watched.running():
            self._sample(log, live)
            seconds = time.monotonic() - self._begun
            due = (math.floor(seconds / interval) + 1) * interval  # a late sample makes the next one no later
            time.sleep(max(0.0, min(due, duration) - seconds))
            if due > duration:
                return

    def summary(self) -> str:
        """Return a line on what was written."""
        gpus = counted(len(self._gpus), "GPU{s}") if self._gpus else "no GPU"
        seconds = time.monotonic() - self._begun
        return f"{counted(self._samples, 'sample{s}')} of {gpus} in {seconds:.0f} s: {self._arguments.output}"

    def _sample(self, log: GpuLogWriter, live: Live | None) -> None:
        gpus = [gpu for gpu in self.devices.read() if gpu.index in self._gpus]
        metrics = {_column(name): value for name, value in self._host.read().items()}
        if self._arguments.pid:
            metrics |= {f"watched_{name}": value for name, value in self._watched.read().items()}
        log.append(time.time(), self._name, metrics, gpus)
        self._samples += 1
        if live is not None:
            live.update(Text(self._line(gpus, metrics), no_wrap=True, overflow="ellipsis"), refresh=True)

    def _line(self, gpus: list[GpuSample], metrics: dict[str, float]) -> str:
        parts = [counted(self._samples, "sample{s}"), *map(_describe, gpus)]
        if "cpu_percent" in metrics:
            parts.append(f"CPUs {metrics['cpu_percent']:.0f} %")
        parts.append(f"memory {metrics['host_used_bytes'] / _GIB:.1f}/{metrics['host_total_bytes'] / _GIB:.0f} GiB")
        if "watched_rss_bytes" in metrics:
            parts.append(f"watched {metrics['watched_rss_bytes'] / _GIB:.1f} GiB")
        return " · ".join([*parts, "Ctrl-C ends"])


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


@contextmanager
def _live() -> Iterator[Live | None]:
    """A line that is kept up to date, where stdout is a terminal."""
    console = Console()
    if not console.is_terminal:
        yield None
        return
    with Live(console=console, auto_refresh=False, transient=True, redirect_stderr=True) as live:
        yield live


def _process(pid: int) -> psutil.Process:
    try:
        return psutil.Process(pid)
    except psutil.Error as error:
        raise ConfigError(f"--pid {pid}: there is no such process") from error


def _column(name: str) -> str:
    """The column of one of the host's metrics: ``mem/host_used_bytes``, ``disk/read_bytes_per_s``."""
    return name.removeprefix("mem/").replace("/", "_")


def _describe(gpu: GpuSample) -> str:
    forms = {"util_percent": "{:.0f} %", "temperature_c": "{:.0f} °C", "power_w": "{:.0f} W"}
    values = gpu.metrics()
    known = [form.format(values[name]) for name, form in forms.items() if name in values]
    if gpu.mem_used_bytes is not None:
        known.append(f"{gpu.mem_used_bytes / _GIB:.1f} GiB")
    return " ".join([f"GPU {gpu.index}", *known])
