"""The thread that looks at a worker, and on one worker of each machine at the machine and its GPUs, while it trains.

In: an interval, and what the loop says of its last step (:meth:`Sampler.note`). Out: a line a sample in
``<run>/monitoring/worker-00000.jsonl``, and the same figures to Prometheus. What they are called is in
:mod:`monitoring.sampling.metric_names`; where they go from the file (W&B, alerts, pictures) is left to those who follow
it.

A sample has a ``kind`` ("sample"), the ``step`` and ``epoch`` last noted, a ``time`` (Unix seconds), the ``host``, the
``worker``, and ``figures``: what could be read, by name. Nothing here raises into the run or waits for a GPU's kernels:
what goes wrong is one warning, and the other figures go on.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from monitoring.sampling.host import HostSampler, ProcessSampler
from monitoring.sampling.metric_names import LOOP_METRICS, last_part
from monitoring.sampling.nvml import GpuSample, NvmlDevices
from monitoring.sampling.peak_flops import flops_utilization, matrix_precision
from monitoring.sampling.peak_flops import peak_tflops as known_peak_tflops
from monitoring.sampling.prometheus import PrometheusExporter
from run_folder.metrics_log import MetricsLog

CLOSE_LIMIT_S = 5.0
"""Seconds that close() waits for a sample in progress; a driver that hangs must not hold up the end of a run."""
_LOOP_FIGURES = tuple(last_part(metric) for metric in LOOP_METRICS)
_RUN_FIGURES = {
    "tokens_per_s": "perf/tokens_per_s",
    "step_s": "perf/step_s",
    "padding_share": "perf/padding_share",
    "loss": "train/loss",
}
_GPU_FIGURES = {"util_percent": "util", "mem_util_percent": "mem_util"}
"""Fields of a GpuSample whose figures have another name."""

Figures = dict[str, float]


@dataclass(frozen=True)
class _Noted:
    """What the loop last said."""

    step: int = 0
    epoch: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _EpochEnd:
    """What the loop had said when an epoch ended, and the peak of it."""

    noted: _Noted
    peak_bytes: int


class Sampler:
    """A daemon thread that samples every so often and appends to a file of this worker's own.

    Args:
        path: the file; made, with its folder, if absent, else appended to.
        worker: rank of the worker.
        device: what it computes on.
        node: also look at the machine and all its GPUs: one worker of each machine does.
        interval_s: seconds between samples.
        prometheus: also export the figures through Ray, where it runs.
        warn: called from the thread with one line where something can't be read or written, once for each cause.
        flops_per_token: of forward and backward pass, to tell the model FLOPs utilisation; None leaves it out.
        peak_tflops: of one device; None for what is known of this GPU in this precision.
        amp_dtype: ``training.amp_dtype``.
        tf32: ``training.tf32``.
        world_size: workers, one a device.
        clock: Unix seconds; for tests.
    """

    def __init__(
        self,
        path: Path,
        *,
        worker: int,
        device: torch.device,
        node: bool,
        interval_s: float,
        prometheus: bool,
        warn: Callable[[str], None],
        flops_per_token: float | None = None,
        peak_tflops: float | None = None,
        amp_dtype: str = "bf16",
        tf32: bool = True,
        world_size: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._logged = warn
        self._warnings = _Warnings(self._tell)
        self._worker, self._device, self._interval_s, self._clock = worker, device, interval_s, clock
        self._host_name = socket.gethostname()
        self._file = _SampleFile(path)
        self._exporter = PrometheusExporter(worker, self._host_name) if prometheus else None
        self._utilization = _Utilization(flops_per_token, peak_tflops, amp_dtype, tf32, world_size, device)
        self._process = ProcessSampler()
        self._node = _Node(self._warnings.tell) if node else None
        self._gpu = _uuid(device)
        self._noted = _Noted()
        self._epoch: int | None = None
        self._epoch_ends: deque[_EpochEnd] = deque()
        self._closing, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)

    def start(self) -> Sampler:
        """Begin: the first sample at once."""
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            self._warnings.tell(f"the run is not monitored: {error}")
        return self

    def note(self, step: int, epoch: int, figures: Mapping[str, float]) -> None:
        """Take what the loop says of its last logged step: ``tokens_per_s``, ``loss``, ``forward_s`` and the like.

        Costs nothing: the next sample has it.
        """
        self._noted = _Noted(step, epoch, dict(figures))
        self._epoch = epoch if self._epoch is None else min(self._epoch, epoch)

    def new_epoch(self) -> None:
        """Peaks begin anew; a sample tells those of the epoch that has ended.

        The last step of an epoch may be noted under the next one, as the position from which the run would go on.
        """
        ended = self._noted.epoch if self._epoch is None else self._epoch
        self._epoch = max(self._noted.epoch, ended + 1)
        if self._device.type != "cuda":
            return
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        noted = _Noted(self._noted.step, ended, self._noted.figures)
        self._epoch_ends.append(_EpochEnd(noted, peak_bytes))
        self._wake.set()

    def sample(self) -> None:
        """Look once, now, and write it. Never raises. Called by the thread; by others only where it is not started."""
        while self._epoch_ends:
            end = self._epoch_ends.popleft()
            self._write(end.noted, self._read(end.noted, end.peak_bytes))
        noted = self._noted
        self._write(noted, self._read(noted, None))

    def close(self) -> None:
        """Take a last sample and end. Never raises; may be called again."""
        self._closing.set()
        self._wake.set()
        if self._thread.ident is None or self._thread is threading.current_thread():
            return
        self._thread.join(CLOSE_LIMIT_S)
        if self._thread.is_alive():
            self._warnings.tell(f"monitoring hangs: its last sample did not come within {CLOSE_LIMIT_S:g} s")

    def _work(self) -> None:
        due_s = time.monotonic()
        while True:
            last = self._closing.is_set()
            self._wake.clear()
            self.sample()
            if last:
                break
            if time.monotonic() >= due_s:  # else the end of an epoch woke it
                due_s = max(due_s + self._interval_s, time.monotonic())
            self._wake.wait(due_s - time.monotonic())
        self._guarded("NVML", self._node.close if self._node else lambda: None)
        self._guarded("the file of samples", self._file.close)

    def _read(self, noted: _Noted, peak_bytes: int | None) -> Figures:
        """Everything that can be read, by name."""
        figures: Figures = {}
        own = f"worker/{self._worker}"
        process = self._guarded("psutil", self._process.read)
        memory = self._guarded("torch", lambda: torch_figures(self._device, peak_bytes))
        loop = {name: noted.figures[name] for name in _LOOP_FIGURES if name in noted.figures}
        figures |= {f"{own}/{name}": value for name, value in (process | memory | loop).items()}
        if self._worker == 0:
            figures |= {name: noted.figures[key] for key, name in _RUN_FIGURES.items() if key in noted.figures}
            figures |= self._guarded("the model FLOPs utilisation", lambda: self._utilization.figures(noted.figures))
        if self._node is not None:
            if "rss_bytes" in process:
                figures["mem/host_rss_bytes"] = process["rss_bytes"]
            figures |= self._guarded("psutil", self._node.host.read)
            figures |= self._guarded("NVML", self._node.gpus)
        return {name: value for name, value in figures.items() if isinstance(value, int | float)}

    def _write(self, noted: _Noted, figures: Figures) -> None:
        record: dict[str, object] = {
            "kind": "sample",
            "step": noted.step,
            "epoch": noted.epoch,
            "time": self._clock(),
            "host": self._host_name,
            "worker": self._worker,
            "figures": figures,
        }
        if self._gpu is not None:
            record["gpu"] = self._gpu
        if self._node is not None and self._node.uuids:
            record["gpus"] = self._node.uuids
        self._guarded("the file of samples", lambda: self._file.append(record))
        if self._exporter is not None:
            exporter = self._exporter
            self._guarded("Prometheus", lambda: exporter.export(figures))

    def _tell(self, message: str) -> None:
        """To this worker's log and, for who follows the run, to the file: other workers' logs are not looked at."""
        self._logged(message)
        told = {"step": self._noted.step, "time": self._clock(), "message": f"worker {self._worker}: {message}"}
        self._file.append({"kind": "event", "event": "warning", **told})

    def _guarded(self, what: str, call: Callable[[], Figures | None]) -> Figures:
        """What ``call`` gives; nothing and one warning where it fails."""
        try:
            return call() or {}
        except Exception as error:  # noqa: BLE001 - told once; a run does not end for its monitoring
            self._warnings.tell(f"monitoring: {what} failed ({type(error).__name__}: {error})", cause=what)
            return {}


def gpu_figures(sample: GpuSample) -> Figures:
    """The figures of a GPU by their full names."""
    return {f"gpu/{sample.index}/{_GPU_FIGURES.get(name, name)}": value for name, value in sample.figures().items()}


def torch_figures(device: torch.device, peak_bytes: int | None = None) -> Figures:
    """What torch's allocator says of a GPU, without waiting for it; nothing on the CPU.

    Args:
        device: of the worker.
        peak_bytes: most that was in tensors; None for what torch says.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    allocated, reserved = stats.get("allocated_bytes.all.current", 0), stats.get("reserved_bytes.all.current", 0)
    return {
        "torch_allocated_bytes": allocated,
        "torch_reserved_bytes": reserved,
        "torch_peak_bytes": stats.get("allocated_bytes.all.peak", 0) if peak_bytes is None else peak_bytes,
        "torch_alloc_retries": stats.get("num_alloc_retries", 0),
        "torch_fragmentation": (reserved - allocated) / reserved if reserved else 0.0,
    }


def _uuid(device: torch.device) -> str | None:
    """Of the GPU on which a worker computes, as NVML writes it."""
    if device.type != "cuda":
        return None
    try:
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    except (RuntimeError, AssertionError, AttributeError):  # without it, alerts are of every GPU of the machine
        return None


class _Node:
    """The machine and its GPUs, whose driver is opened by the first look."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.host = HostSampler()
        self.uuids: dict[str, str] = {}
        self._warn = warn
        self._devices: NvmlDevices | None = None

    def gpus(self) -> Figures:
        if self._devices is None:
            self._devices = NvmlDevices.open(self._warn)
        figures: Figures = {}
        for sample in self._devices.read():
            figures |= gpu_figures(sample)
            self.uuids[str(sample.index)] = sample.uuid
        return figures

    def close(self) -> None:
        if self._devices is not None:
            self._devices.close()


@dataclass
class _Utilization:
    """Model FLOPs utilisation, where the model's operations and the devices' peak are known."""

    flops_per_token: float | None
    peak_tflops: float | None
    amp_dtype: str
    tf32: bool
    world_size: int
    device: torch.device
    _looked: bool = False

    def figures(self, noted: Mapping[str, float]) -> Figures:
        if not self._looked:
            self._looked = True
            if self.peak_tflops is None and self.device.type == "cuda":
                precision = matrix_precision(self.amp_dtype, self.tf32)
                self.peak_tflops = known_peak_tflops(torch.cuda.get_device_name(self.device), precision)
        flops_per_token = noted.get("flops_per_token", self.flops_per_token)
        if not flops_per_token or not self.peak_tflops or "tokens_per_s" not in noted:
            return {}
        rate = noted["tokens_per_s"]
        return {"perf/mfu": flops_utilization(rate, flops_per_token, self.peak_tflops, self.world_size)}


class _SampleFile:
    """A MetricsLog that is opened when it is needed, and again after it failed: the disk may have room by then."""

    def __init__(self, path: Path) -> None:
        self._path = Path(path)
        self._log: MetricsLog | None = None

    def append(self, record: Mapping[str, object]) -> None:
        log = self._log or MetricsLog(self._path)
        self._log = None
        try:
            log.append(record)
        except OSError:
            log.close()
            raise
        self._log = log

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


class _Warnings:
    """Each cause is told once."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._told: set[str] = set()

    def tell(self, message: str, cause: str | None = None) -> None:
        """Pass on, unless this cause (by default, this message) was told. Never raises."""
        cause = cause or message
        if cause in self._told:
            return
        self._told.add(cause)
        try:
            self._warn(message)
        except Exception:  # noqa: BLE001 - where even a warning can't be written, there is nobody left to tell
            return
