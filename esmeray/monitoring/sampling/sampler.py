"""Background thread that samples a worker during training.

One worker per machine also samples the machine and its GPUs.

A sample is a line in ``<run>/monitoring/worker-00000.jsonl``: ``kind`` ("sample"), the last noted ``step`` and
``epoch``, ``time`` (Unix seconds), ``host``, ``worker``, and ``metrics`` by the names of
:mod:`esmeray.monitoring.sampling.metric_names`. If Ray runs, metrics also go to Prometheus. Nothing here raises into
the run or waits for GPU kernels: a failure is one warning, and everything else is still sampled.
"""

import math
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from esmeray.monitoring.sampling.host import HostSampler, ProcessSampler
from esmeray.monitoring.sampling.metric_names import RUN_METRICS, WORKER_METRICS, Metric, find
from esmeray.monitoring.sampling.nvml import NvmlDevices
from esmeray.run_folder.metrics_log import MetricsLog, steady_time

CLOSE_LIMIT_S = 5.0
"""Seconds that close() waits for a sample in progress, so that a hanging driver cannot delay the end of a run."""

Values = dict[str, float]


class _Noted(NamedTuple):
    """The last step that the loop noted; ``peak_bytes`` is torch's peak memory if an epoch ended with it."""

    step: int = 0
    epoch: int = 0
    values: Mapping[str, float] = {}
    peak_bytes: int | None = None


@dataclass(kw_only=True, eq=False)
class Sampler:
    """A daemon thread that samples at an interval and appends to this worker's own file.

    Attributes:
        path: the file; created with its folder if absent, otherwise appended to.
        worker, device: rank and compute device.
        node: also sample the machine and all its GPUs; set for one worker per machine.
        warn: called from the thread with one line if something can't be read or written, once per cause.
        flops_per_token, peak_tflops: FLOPs of both passes, and the peak of all devices together; for the MFU.
        clock: Unix seconds; for tests.
    """

    path: Path
    worker: int
    device: torch.device
    node: bool
    interval_s: float
    warn: Callable[[str], None]
    flops_per_token: float | None = None
    peak_tflops: float | None = None
    clock: Callable[[], float] = steady_time

    def __post_init__(self) -> None:
        self._host_name = socket.gethostname()
        self._gauges: dict[Metric, Any] = {}  # of ray.util.metrics
        self._process = ProcessSampler()
        self._host = HostSampler()
        self._devices: NvmlDevices | None = None  # opened by the thread, since a driver call may hang
        self._uuid = _uuid(self.device)
        self._uuids: dict[str, str] = {}
        self._warned: set[str] = set()
        self._noted = _Noted()
        self._epoch: int | None = None
        self._epoch_ends: deque[_Noted] = deque()  # append and popleft are atomic: no lock between loop and thread
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)

    def start(self) -> "Sampler":
        self._guarded("the thread of monitoring", self._thread.start)  # there may be no more threads
        return self

    def note(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Store the values of the last logged step for the next sample: ``tokens_per_s``, ``loss`` ..."""
        # A new tuple each time: the thread never sees values of one step under another step's number.
        self._noted = _Noted(step, epoch, dict(values))
        self._epoch = epoch if self._epoch is None else min(self._epoch, epoch)

    def new_epoch(self) -> None:
        """Reset torch's peak memory; a separate sample reports the peak of the epoch that has ended."""
        # The last step of an epoch may be noted under the next epoch, as the position to resume from.
        ended = self._noted.epoch if self._epoch is None else self._epoch
        self._epoch = max(self._noted.epoch, ended + 1)
        if self.device.type == "cuda":
            # Read now, by the loop: the value is lost after the reset.
            peak_bytes = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._epoch_ends.append(self._noted._replace(epoch=ended, peak_bytes=peak_bytes))

    def sample(self) -> None:
        """Write one sample now. Never raises. Call it from other threads only if this one is not started."""
        while self._epoch_ends:
            self._write(self._epoch_ends.popleft())
        self._write(self._noted)

    def close(self) -> None:
        """Take a last sample and stop. Never raises; may be called again."""
        self._closing.set()
        if self._thread.ident is None:
            return
        self._thread.join(CLOSE_LIMIT_S)
        if self._thread.is_alive():
            self._warn(f"monitoring hangs: its last sample did not finish within {CLOSE_LIMIT_S:g} s")

    def _work(self) -> None:
        self.sample()
        due_s = time.monotonic() + self.interval_s
        while not self._closing.wait(max(0.0, due_s - time.monotonic())):
            self.sample()
            due_s = max(due_s + self.interval_s, time.monotonic())  # missed samples are skipped
        self.sample()  # the run's last values, and the end of its last epoch
        if self._devices is not None:
            self._guarded("NVML", self._devices.close)

    def _write(self, noted: _Noted) -> None:
        values = self._read(noted)
        record: dict[str, object] = {
            "kind": "sample",
            "step": noted.step,
            "epoch": noted.epoch,
            "time": self.clock(),
            "host": self._host_name,
            "worker": self.worker,
            "metrics": values,
        }
        record |= {name: uuids for name, uuids in (("gpu", self._uuid), ("gpus", self._uuids)) if uuids}
        self._guarded("the file of samples", lambda: self._append(record))
        self._guarded("Prometheus", lambda: self._export(values))

    def _read(self, noted: _Noted) -> Values:
        process = self._guarded("psutil", self._process.read)
        memory = self._guarded("torch", lambda: _torch_memory(self.device, noted.peak_bytes))
        own = {**noted.values, **process, **memory}
        values = {WORKER_METRICS[name].format(worker=self.worker): own[name] for name in own if name in WORKER_METRICS}
        if self.worker == 0:  # metrics of the whole run, which every worker knows
            values |= {name: noted.values[key] for key, name in RUN_METRICS.items() if key in noted.values}
            values |= self._utilization(noted.values)
        if self.node:
            values |= self._guarded("psutil", self._host.read)
            values |= self._guarded("NVML", self._gpus)
        return values

    def _utilization(self, step: Mapping[str, float]) -> Values:
        """Return ``throughput/mfu`` (Chowdhery et al. 2022, appendix B); recomputed operations do not count."""
        flops_per_token = step.get("flops_per_token", self.flops_per_token)
        if not flops_per_token or not self.peak_tflops or "tokens_per_s" not in step:
            return {}
        return {"throughput/mfu": step["tokens_per_s"] * flops_per_token / (self.peak_tflops * 1e12)}

    def _gpus(self) -> Values:
        """Return values of all GPUs of the machine; the first call opens the driver."""
        self._devices = self._devices or NvmlDevices(self._warn)
        values: Values = {}
        for sample in self._devices.read():
            values |= {f"gpu/{sample.index}/{name}": value for name, value in sample.metrics.items()}
            self._uuids[str(sample.index)] = sample.uuid
        return values

    def _append(self, record: Mapping[str, object]) -> None:
        # Opened each time: a full disk or an unmounted folder may be back.
        with MetricsLog(self.path) as log:
            log.append(record)

    def _guarded(self, source: str, call: Callable[[], Values | None]) -> Values:
        """Return the result of ``call``; if it fails, warn once and return nothing."""
        try:
            return call() or {}
        except Exception as error:  # noqa: BLE001 - reported once; a run does not end for its monitoring
            self._warn(f"monitoring: {source} failed ({type(error).__name__}: {error})", cause=source)
            return {}

    def _warn(self, message: str, cause: str = "") -> None:
        """Report to the log and to the file, once per cause. Never raises."""
        if (cause or message) in self._warned:
            return
        self._warned.add(cause or message)  # first: a warning that can't be written is not tried again at each sample
        try:
            self.warn(message)
            # Into this worker's file, which the driver follows: a worker on another machine has no terminal.
            self._append(
                {
                    "kind": "event",
                    "event": "warning",
                    "step": self._noted.step,
                    "time": self.clock(),
                    "message": f"worker {self.worker}: {message}",
                }
            )
        except Exception:  # noqa: BLE001 - a warning that cannot be written cannot be reported either
            return

    def _export(self, values: Mapping[str, float]) -> None:
        """Set the gauges ``ray_esmeray_...`` of finite values on Ray's port; do nothing without Ray."""
        ray = sys.modules.get("ray")  # not imported here: a process that has not imported it is in no cluster
        if ray is None or not ray.is_initialized():
            return
        for name, value in values.items():
            known = find(name)
            if known is None or not math.isfinite(value):
                continue
            metric, index = known
            tags = {"worker": str(self.worker), "host": self._host_name}
            if "{gpu}" in metric.name:
                tags["gpu"] = str(index)
            if metric not in self._gauges:
                from ray.util.metrics import Gauge  # imported here: not needed without Ray

                self._gauges[metric] = Gauge(metric.prometheus_name, f"{metric.description} ({metric.unit}).", (*tags,))
            self._gauges[metric].set(value, tags)


def _torch_memory(device: torch.device, peak_bytes: int | None) -> Values:
    """Return the state of torch's allocator on a GPU, without synchronising; empty on the CPU."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)  # empty until the first tensor
    allocated = stats.get("allocated_bytes.all.current", 0)
    reserved = stats.get("reserved_bytes.all.current", 0)
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
    except (RuntimeError, AssertionError, AttributeError):  # without it, alerts cover every GPU of the machine
        return None
