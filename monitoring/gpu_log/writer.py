"""Recording of this machine's GPUs, whatever uses them, as nvidia-smi writes it: a row for each GPU and sample.

A sample is one write, so that a killed writer leaves at most one partial line, which the next writer drops and the
reader passes over.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import psutil

from common.errors import ConfigError, DataError, ResourceError
from common.progress import status_line
from common.steady_time import steady_time
from common.text import counted
from monitoring.gpu_log.reader import COLUMNS, FACTORS, GPU, NAME, TIME, UUID
from monitoring.sampling.host import HostSampler, ProcessSampler
from monitoring.sampling.nvml import GpuSample, NvmlDevices
from train_config.command_schema import GpuProfileSection

_HEADER = ", ".join(column.header for column in COLUMNS.values()).encode() + b"\n"
_SHOWN = {"util": "{:.0f} %", "temperature_c": "{:.0f} °C", "power_w": "{:.0f} W"}
_GIB = 2.0**30


class GpuLogWriter(contextlib.AbstractContextManager["GpuLogWriter"]):
    """Appends samples to a CSV file, which is made if absent, with its folder.

    Raises DataError where the file is something else, ConfigError where neither its folder nor the one around that is
    there, ResourceError where it can't be written.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        folder = self.path.absolute().parent
        if not folder.parent.is_dir():
            raise ConfigError(f"{self.path}: there is no folder {folder.parent}; make it first")
        try:
            folder.mkdir(exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise ResourceError(f"{self.path}: can't be written: {error.strerror}; give another file") from error
        self._file.seek(0)
        present = self._file.read()
        if present and not present.startswith(_HEADER[: len(present)]):
            self._file.close()
            raise DataError(f"{self.path}: is not a log with these columns; give another file")
        self._file.truncate(present.rfind(b"\n") + 1)
        if b"\n" not in present:
            self._write(_HEADER)

    def append(self, time_s: float, gpus: Sequence[GpuSample]) -> None:
        """Write one sample, whole. ``time_s`` is in Unix seconds."""
        self._write("".join(_row(time_s, gpu) for gpu in gpus).encode())

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write(self, data: bytes) -> None:
        try:
            written = self._file.write(data)
        except OSError as error:
            raise ResourceError(f"{self.path}: can't be written: {error.strerror}") from error
        if written != len(data):
            raise ResourceError(f"{self.path}: only {written} of {len(data)} bytes were written; is the disk full?")


def _row(time_s: float, gpu: GpuSample) -> str:
    moment = datetime.fromtimestamp(time_s).strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]  # local time, as nvidia-smi's
    cells = {TIME: moment, GPU: str(gpu.index), UUID: gpu.uuid, NAME: gpu.name}
    return ", ".join(cells.get(name) or _cell(name, gpu.metrics.get(name)) for name in COLUMNS) + "\n"


def _cell(name: str, value: float | None) -> str:
    if value is None or math.isnan(value):
        return "[N/A]"
    if name == "throttle_reasons":
        return f"0x{int(value):016x}"
    unit = COLUMNS[name].unit
    number = value / FACTORS.get(unit, 1.0)
    return f"{number:.{2 if unit == 'W' else 0}f} {unit}".rstrip()


def record_gpus(path: Path, settings: GpuProfileSection, warn: Callable[[str], None]) -> int:
    """Append samples to ``path`` until Ctrl-C or what the settings name; returns their number.

    Raises ConfigError for a GPU or process that is not there, ResourceError without a GPU, and as the writer does.
    """
    devices, duration_s = NvmlDevices(warn), settings.duration_s or math.inf
    try:
        present = [gpu.index for gpu in devices.read()]
        if not present:
            raise ResourceError("no GPU to record: NVML sees none on this machine; `esmeray profile gpu` says why")
        if absent := sorted(set(settings.gpus) - set(present)):
            raise ConfigError(f"GPU {' '.join(map(str, absent))} is not on this machine; there are: {present}")
        try:
            watched = [psutil.Process(pid) for pid in settings.pid]
        except psutil.NoSuchProcess as error:
            raise ConfigError(f"profile.pid {error.pid}: there is no such process") from error
        host, processes = HostSampler(), [ProcessSampler(process) for process in watched]
        begin_s, samples = time.monotonic(), 0
        with GpuLogWriter(path) as log, status_line() as show, contextlib.suppress(KeyboardInterrupt):
            while not watched or psutil.wait_procs(watched, timeout=0)[1]:
                gpus = [gpu for gpu in devices.read() if gpu.index in (settings.gpus or present)]
                log.append(steady_time(), gpus)
                samples += 1
                show(" · ".join([counted(samples, "sample{s}"), *_state(gpus, host, processes), "Ctrl-C ends"]))
                elapsed_s = time.monotonic() - begin_s
                # A late sample makes the next no later.
                due_s = (math.floor(elapsed_s / settings.interval_s) + 1) * settings.interval_s
                time.sleep(max(0.0, min(due_s, duration_s) - elapsed_s))
                if due_s > duration_s:
                    break
        return samples
    finally:
        devices.close()


def _state(gpus: Sequence[GpuSample], host: HostSampler, processes: Sequence[ProcessSampler]) -> list[str]:
    words = []
    for gpu in gpus:
        values = [form.format(gpu.metrics[name]) for name, form in _SHOWN.items() if name in gpu.metrics]
        words.append(f"GPU {gpu.index} {' '.join(values)} {gpu.metrics.get('mem_used_bytes', 0) / _GIB:.1f} GiB")
    machine = host.read()
    memory = f"{machine['mem/host_used_bytes'] / _GIB:.1f}/{machine['mem/host_total_bytes'] / _GIB:.0f} GiB"
    words.append(f"CPUs {machine.get('cpu/percent', 0):.0f} %, memory {memory}")
    if processes:
        watched_bytes = sum(process.read()["rss_bytes"] for process in processes)
        words.append(f"watched {watched_bytes / _GIB:.1f} GiB")
    return words
