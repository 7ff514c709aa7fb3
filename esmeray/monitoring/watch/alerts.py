"""Alerts of a run in its alerts.jsonl: a loss that is not finite, an idle GPU, nearly full memory.

Each alert is raised once, and again only after its cause was over.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

from esmeray.run_folder.metrics_log import MetricsLog, Record, RecordTail, steady_time

UTILIZATION_PERCENT, UTILIZATION_WINDOW_S = 50.0, 120.0
"""GPU utilisation below which an alert is raised, and seconds that it must last."""
MEMORY_PERCENT = 95.0
"""Share of a device's or the host's memory in use from which an alert is raised."""
BAND_PERCENT = 5.0
"""Hysteresis in percentage points, so that a value near the threshold raises one alert only."""
_GIB = 2.0**30


class AlertSink:
    """Sink that writes ``path``, created with the first alert; alerts left raised by an earlier start are cleared."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raised: set[tuple[str, str]] = set()
        self._idle_since_s: dict[str, float] = {}  # by GPU
        self._worked: set[str] = set()
        self._own_gpus: dict[str, set[str]] = {}  # UUIDs, by machine
        self._finite_losses = 0
        last = {(record.get("name"), record.get("subject")): record for record in RecordTail(self._path).poll()}
        for record in last.values():
            if record.get("state") == "raised":
                over = {"state": "cleared", "message": "the run was restarted", "time": steady_time()}
                self._append(record | over, record)

    def write(self, record: Record) -> None:
        if record["kind"] == "train" and "loss" in record:
            self._check_loss(record)
        elif record["kind"] == "sample":
            host = {name.removeprefix("host/"): value for name, value in record["metrics"].items()}
            remedy = "lower data.num_workers, or stop other processes on the machine"
            self._check_memory(f"host {record['host']}", host, remedy, record)
            for index, values in self._gpus(record).items():
                self._check_gpu(f"GPU {index} on {record['host']}", values, record)
        elif record["kind"] == "event" and record["event"] in ("started", "resumed"):
            self._idle_since_s.clear()  # a GPU is idle between two attempts
            self._worked.clear()  # and may not belong to a worker in the next
            self._own_gpus.clear()

    def close(self) -> None:
        """Do nothing: alerts are written immediately."""

    def _check_loss(self, record: Record) -> None:
        # null in the file, since JSON has no NaN.
        self._finite_losses = 0 if record["loss"] is None else self._finite_losses + 1
        if record["loss"] is None:
            message = (
                f"the loss is not finite at step {record['step']}: lower training.learning_rate, or check the "
                "records listed in the run's folder nonfinite"
            )
            self._set("nonfinite_loss", "loss", True, message, record)
        elif self._finite_losses >= 3:  # in a row: a single one may be chance
            self._set("nonfinite_loss", "loss", False, f"finite again at step {record['step']}", record)

    def _check_gpu(self, gpu: str, values: Mapping[str, float], record: Record) -> None:
        self._check_memory(gpu, values, "lower batch.tokens or set model.backbone.gradient_checkpointing", record)
        percent = values.get("util")
        if percent is None or record["step"] < 1:  # before the first step, data are prepared and kernels compiled
            return
        threshold = UTILIZATION_PERCENT
        if ("low_utilization", gpu) in self._raised:  # hysteresis
            threshold = min(100.0, threshold + BAND_PERCENT)
        if percent > 0:
            self._worked.add(gpu)
        if percent >= threshold:
            self._idle_since_s.pop(gpu, None)
            self._set("low_utilization", gpu, False, f"{gpu}: utilisation is {percent:.0f} % again", record)
            return
        # A GPU that never worked belongs to another job.
        since_s = self._idle_since_s.setdefault(gpu, record["time"]) if gpu in self._worked else math.inf
        if record["time"] - since_s >= UTILIZATION_WINDOW_S:
            state = f"{gpu}: utilisation under {threshold:g} % for {UTILIZATION_WINDOW_S:g} s, now {percent:.0f} %"
            self._set("low_utilization", gpu, True, f"{state}: `esmeray train status` names the cause", record)

    def _check_memory(self, subject: str, values: Mapping[str, float], remedy: str, record: Record) -> None:
        used, total = values.get("mem_used_bytes"), values.get("mem_total_bytes")
        if used is None or not total:
            return
        percent, threshold = 100 * used / total, MEMORY_PERCENT
        if ("memory", subject) in self._raised:
            threshold -= BAND_PERCENT
        state = f"{subject}: {used / _GIB:.1f} of {total / _GIB:.1f} GiB of memory in use ({percent:.0f} %)"
        full = percent >= threshold
        self._set("memory", subject, full, f"{state}: {remedy}" if full else state, record)

    def _gpus(self, record: Record) -> dict[str, dict[str, float]]:
        """Return values of the run's GPUs, by number and last part of the name.

        NVML also reports other jobs' GPUs. If the workers' UUIDs match none, as with MIG slices, all GPUs count.
        """
        own_uuids = self._own_gpus.setdefault(record["host"], set())
        if "gpu" in record:
            own_uuids.add(record["gpu"])
        uuids: Mapping[str, str] = record.get("gpus", {})
        known = own_uuids & set(uuids.values())
        gpus: dict[str, dict[str, float]] = {}
        for name, value in record["metrics"].items():
            gpu = re.fullmatch(r"gpu/(\d+)/(\w+)", name)
            if gpu and value is not None and (not known or uuids.get(gpu[1]) in known):
                gpus.setdefault(gpu[1], {})[gpu[2]] = value
        return gpus

    def _set(self, name: str, subject: str, holds: bool, message: str, record: Record) -> None:
        if holds == ((name, subject) in self._raised):
            return
        self._raised ^= {(name, subject)}
        state = "raised" if holds else "cleared"
        self._append({"name": name, "subject": subject, "state": state, "message": message}, record)

    def _append(self, alert: Record, record: Record) -> None:
        # Opened per alert: without alerts there is no file.
        with MetricsLog(self._path) as log:
            log.append({"kind": "alert", "step": max(record["step"], 0), "time": record["time"], **alert})
