"""Thread that samples a worker while it trains, and on one worker of each machine the machine and its GPUs.

A sample is a line in ``<run>/monitoring/worker-00000.jsonl``: a ``kind`` ("sample"), the ``step`` and ``epoch`` last
noted, a ``time`` (Unix seconds), the ``host``, the ``worker``, and ``metrics``: values by the names of
:mod:`monitoring.sampling.metric_names`. Nothing here raises into the run or waits for a GPU's kernels: what fails is
one warning, and the rest is sampled.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from monitoring.sampling.host import HostSampler, ProcessSampler
from monitoring.sampling.metric_names import LOOP_METRICS, last_part
from monitoring.sampling.nvml import GpuSample, NvmlDevices
from monitoring.sampling.peak_flops import flops_utilization, matrix_precision, peak_tflops
from monitoring.sampling.prometheus import PrometheusExporter
from run_folder.metrics_log import MetricsLog

CLOSE_LIMIT_S = 5.0
"""Seconds that close() waits for a sample in progress; a driver that hangs must not hold up the end of a run."""
_LOOP_METRICS = tuple(last_part(metric) for metric in LOOP_METRICS)
_RUN_METRICS = {
    "tokens_per_s": "perf/tokens_per_s",
    "step_s": "perf/step_s",
    "padding_share": "perf/padding_share",
    "loss": "train/loss",
}
_GPU_METRICS = {"util_percent": "util", "mem_util_percent": "mem_util"}
"""Fields of a GpuSample whose metrics have another name."""

Values = dict[str, float]


@dataclass(frozen=True)
class Utilization:
    """Inputs of the model FLOPs utilisation beside the speed.

    Attributes:
        flops_per_token: of forward and backward pass; None where it is not known.
        peak_tflops: of one device; None for that of this GPU's data sheet.
        precision, tf32: as in section training.
        world_size: workers, one a device.
    """

    flops_per_token: float | None = None
    peak_tflops: float | None = None
    precision: str = "bf16"
    tf32: bool = True
    world_size: int = 1

    def on(self, device: torch.device) -> "Utilization":
        """Fill in the peak of this GPU where it is known."""
        if self.peak_tflops is not None or device.type != "cuda":
            return self
        known = peak_tflops(torch.cuda.get_device_name(device), matrix_precision(self.precision, self.tf32))
        return replace(self, peak_tflops=known)

    def share(self, step: Mapping[str, float]) -> Values:
        """Return ``perf/mfu``, or nothing where something is not known."""
        flops_per_token = step.get("flops_per_token", self.flops_per_token)
        if not flops_per_token or not self.peak_tflops or "tokens_per_s" not in step:
            return {}
        rate = step["tokens_per_s"]
        return {"perf/mfu": flops_utilization(rate, flops_per_token, self.peak_tflops, self.world_size)}


@dataclass(frozen=True)
class _Noted:
    """The last step that the loop noted; ``peak_bytes`` of torch's memory if an epoch has ended with it."""

    step: int = 0
    epoch: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None


class Sampler:
    """A daemon thread that samples every so often and appends to a file of this worker's own.

    Args:
        path: the file; made, with its folder, if absent, else appended to.
        worker: rank of the worker.
        device: what it computes on.
        node: also look at the machine and all its GPUs: one worker of each machine does.
        interval_s: seconds between samples.
        prometheus: also export the values through Ray, where it runs.
        warn: called from the thread with one line where something can't be read or written, once for each cause.
        utilization: for the model FLOPs utilisation.
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
        utilization: Utilization | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._worker, self._device = path, worker, device
        self._interval_s, self._clock, self._log_warning = interval_s, clock, warn
        self._host_name = socket.gethostname()
        self._exporter = PrometheusExporter(worker, self._host_name) if prometheus else None
        self._utilization = (utilization or Utilization()).on(device)
        self._process = ProcessSampler()
        self._host = HostSampler() if node else None
        self._devices: NvmlDevices | None = None
        self._uuid = _uuid(device)
        self._uuids: dict[str, str] = {}
        self._warned: set[str] = set()
        self._noted = _Noted()
        self._epoch: int | None = None
        self._epoch_ends: deque[_Noted] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)

    def start(self) -> "Sampler":
        """Begin: the first sample at once."""
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            self._warn(f"the run is not monitored: {error}")
        return self

    def note(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Take the values of the last logged step for the next sample: ``tokens_per_s``, ``loss``, ``forward_s`` ..."""
        self._noted = _Noted(step, epoch, dict(values))
        self._epoch = epoch if self._epoch is None else min(self._epoch, epoch)

    def new_epoch(self) -> None:
        """Reset torch's peak of memory; a sample of its own reports that of the epoch that has ended.

        The last step of an epoch may be noted under the next one, as the position from which the run would resume.
        """
        ended = self._noted.epoch if self._epoch is None else self._epoch
        self._epoch = max(self._noted.epoch, ended + 1)
        if self._device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._epoch_ends.append(replace(self._noted, epoch=ended, peak_bytes=peak_bytes))

    def sample(self) -> None:
        """Look once, now, and write it. Never raises. Called by the thread; by others only where it is not started."""
        while self._epoch_ends:
            self._write(self._epoch_ends.popleft())
        self._write(self._noted)

    def close(self) -> None:
        """Take a last sample and end. Never raises; may be called again."""
        self._closing.set()
        if self._thread.ident is None:
            return
        self._thread.join(CLOSE_LIMIT_S)
        if self._thread.is_alive():
            self._warn(f"monitoring hangs: its last sample did not come within {CLOSE_LIMIT_S:g} s")

    def _work(self) -> None:
        self.sample()
        due_s = time.monotonic() + self._interval_s
        while not self._closing.wait(max(0.0, due_s - time.monotonic())):
            self.sample()
            due_s = max(due_s + self._interval_s, time.monotonic())
        self.sample()
        if self._devices is not None:
            self._guarded("NVML", self._devices.close)

    def _write(self, noted: _Noted) -> None:
        values = self._read(noted)
        record: dict[str, object] = {
            "kind": "sample",
            "step": noted.step,
            "epoch": noted.epoch,
            "time": self._clock(),
            "host": self._host_name,
            "worker": self._worker,
            "metrics": values,
        }
        record |= {"gpu": self._uuid} if self._uuid is not None else {}
        record |= {"gpus": self._uuids} if self._uuids else {}
        self._guarded("the file of samples", lambda: self._append(record))
        if self._exporter is not None:
            exporter = self._exporter
            self._guarded("Prometheus", lambda: exporter.export(values))

    def _read(self, noted: _Noted) -> Values:
        process = self._guarded("psutil", self._process.read)
        memory = self._guarded("torch", lambda: _torch_memory(self._device, noted.peak_bytes))
        loop = {name: noted.values[name] for name in _LOOP_METRICS if name in noted.values}
        values = {f"worker/{self._worker}/{name}": value for name, value in (process | memory | loop).items()}
        if self._worker == 0:
            values |= {name: noted.values[key] for key, name in _RUN_METRICS.items() if key in noted.values}
            values |= self._utilization.share(noted.values)
        if self._host is not None:
            if "rss_bytes" in process:
                values["mem/host_rss_bytes"] = process["rss_bytes"]
            values |= self._guarded("psutil", self._host.read)
            values |= self._guarded("NVML", self._gpus)
        return {name: value for name, value in values.items() if isinstance(value, int | float)}

    def _gpus(self) -> Values:
        """Values of all GPUs of the machine, whose driver is opened by the first look."""
        self._devices = self._devices or NvmlDevices(self._warn)
        values: Values = {}
        for sample in self._devices.read():
            values |= gpu_values(sample)
            self._uuids[str(sample.index)] = sample.uuid
        return values

    def _append(self, record: Mapping[str, object]) -> None:
        with MetricsLog(self._path) as log:
            log.append(record)

    def _guarded(self, what: str, call: Callable[[], Values | None]) -> Values:
        """Return the result of ``call``; nothing and one warning where it fails."""
        try:
            return call() or {}
        except Exception as error:  # noqa: BLE001 - reported once; a run does not end for its monitoring
            self._warn(f"monitoring: {what} failed ({type(error).__name__}: {error})", cause=what)
            return {}

    def _warn(self, message: str, cause: str = "") -> None:
        """Report to the log and, for who follows the run, to the file, unless this cause was reported. Never raises."""
        if (cause or message) in self._warned:
            return
        self._warned.add(cause or message)
        event = {"kind": "event", "event": "warning", "step": self._noted.step, "time": self._clock()}
        try:
            self._log_warning(message)
            self._append({**event, "message": f"worker {self._worker}: {message}"})
        except Exception:  # noqa: BLE001 - where even a warning can't be written, there is nobody left to report to
            return


def gpu_values(sample: GpuSample) -> Values:
    return {f"gpu/{sample.index}/{_GPU_METRICS.get(name, name)}": value for name, value in sample.metrics().items()}


def _torch_memory(device: torch.device, peak_bytes: int | None) -> Values:
    """State of torch's allocator on a GPU, without waiting for it; nothing on the CPU."""
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
    if device.type != "cuda":
        return None
    try:
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    except (RuntimeError, AssertionError, AttributeError):  # without it, alerts are of every GPU of the machine
        return None
