"""Alerts of a run: each is raised once, and again only after what it reports was over.

:mod:`monitoring.watch.alert_rules` finds what holds in a record; here is how long it must last, and until it counts as
over. :class:`AlertSink` appends alerts to the run's alerts.jsonl, which whoever shows or sends them follows.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import DataError
from monitoring.watch.alert_rules import Finding, OwnGpus, Rule, rules
from run_folder.metrics_log import MetricsLog, Record, read_metrics
from train_config.monitoring_schema import AlertsSection

logger = logging.getLogger(__name__)

SILENT_WORKER = "silent_worker"
MISSED_SAMPLES = 3
"""Samples that may be missing before a worker counts as silent or a span of time as not watched."""
ENDS = frozenset({"finished", "stopped", "failed", "diverged"})
"""Events after which workers fall silent as they should."""


@dataclass(frozen=True)
class Alert:
    """A warning, or that its cause is over.

    Attributes:
        name: low_utilization, memory, leak, throttling, nonfinite_loss or silent_worker.
        subject: what it is about: a GPU, a machine, a worker.
        state: raised or cleared.
        message: a line for a person.
        step: that was last logged.
        time: Unix seconds.
    """

    name: str
    subject: str
    state: Literal["raised", "cleared"]
    message: str
    step: int
    time: float

    def record(self) -> Record:
        """Return it as a line of alerts.jsonl."""
        return {"kind": "alert", **vars(self)}


@dataclass
class _Latch:
    """Raised once something has lasted, cleared once its end has; silent in between."""

    raised: bool = False
    _since_s: float | None = None
    _seen_s: float = -math.inf

    def update(self, time_s: float, holds: bool | None, lasts_s: float, gap_s: float) -> bool:
        """Take a look; return whether this changes it.

        Args:
            time_s: of what was seen.
            holds: whether it holds; None between the thresholds, where nothing changes.
            lasts_s: for how long it must hold, or be over.
            gap_s: between two looks, beyond which nobody knows what was in between.
        """
        if time_s - self._seen_s > gap_s or holds is None or holds == self.raised:
            self._since_s = None
        self._seen_s = time_s
        if holds is None or holds == self.raised:
            return False
        if self._since_s is None:
            self._since_s = time_s
        if time_s - self._since_s < lasts_s:
            return False
        self.raised, self._since_s = holds, None
        return True


class Alerts:
    """Turns records into alerts.

    Args:
        settings: thresholds.
        interval_s: seconds between samples.
        raised: name and subject of alerts that were not over when the run was left.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        settings: AlertsSection,
        interval_s: float,
        raised: Iterable[tuple[str, str]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules: list[Rule] = rules(settings)
        self._missed_s = MISSED_SAMPLES * interval_s
        self._silence_s = max(settings.silent_worker_s, self._missed_s)
        self._clock = clock
        self._latches = {key: _Latch(raised=True) for key in raised}
        self._heard: dict[str, tuple[float, int]] = {}  # by worker: when, and its step
        self._hosts: set[str] = set()
        self._began_s = clock()
        self._gpus = OwnGpus()
        self._step = 0

    def take(self, record: Record) -> list[Alert]:
        """Return the alerts that a record causes."""
        if record["kind"] == "alert":
            return []
        self._step = max(int(record["step"]), 0)
        alerts = self._listen(record)
        record = self._gpus.only(record)
        for rule in self._rules:
            for finding in rule.take(record):
                lasts_s = rule.clears_after_s if self._latch(rule.name, finding).raised else rule.raises_after_s
                alerts += self._note(rule.name, finding, record["time"], lasts_s)
        return alerts

    def tick(self) -> list[Alert]:
        """Return the alerts that silence causes. To be called every now and then."""
        alerts = []
        for worker, (heard_s, step) in self._heard.items():
            silent_s = self._clock() - heard_s
            if silent_s >= self._silence_s:
                reason = "its process hangs or is gone, see its file in the run's logs"
                message = f"{worker} has not reported for {silent_s:.0f} s, since step {step}: {reason}"
                alerts += self._note(SILENT_WORKER, Finding(worker, True, message), time.time())
        return alerts + self._of_machines_left()

    def _of_machines_left(self) -> list[Alert]:
        """Clear the alerts of a machine that the run has left."""
        if not self._hosts or self._clock() - self._began_s < self._silence_s:
            return []
        alerts = []
        for (name, subject), latch in list(self._latches.items()):
            host = _host_of(subject)
            if latch.raised and host is not None and host not in self._hosts:
                alerts += self._note(name, Finding(subject, False, f"{subject}: the run has left it"), time.time())
        return alerts

    def _listen(self, record: Record) -> list[Alert]:
        if record["kind"] == "event" and record["event"] in ENDS:
            self._heard.clear()
        if record["kind"] != "sample":
            return []
        worker = f"worker {record['worker']}"
        self._hosts.add(str(record["host"]))
        self._heard[worker] = (self._clock(), record["step"])
        return self._note(SILENT_WORKER, Finding(worker, False, f"{worker} reports again"), record["time"])

    def _latch(self, name: str, finding: Finding) -> _Latch:
        return self._latches.setdefault((name, finding.subject), _Latch())

    def _note(self, name: str, finding: Finding, time_s: float, lasts_s: float = 0.0) -> list[Alert]:
        latch = self._latch(name, finding)
        if not latch.update(time_s, finding.holds, lasts_s, gap_s=max(lasts_s, self._missed_s)):
            return []
        state: Literal["raised", "cleared"] = "raised" if latch.raised else "cleared"
        return [Alert(name, finding.subject, state, finding.message, self._step, time_s)]


def _host_of(subject: str) -> str | None:
    """The machine that an alert is about: of ``GPU 3 on node-a`` and ``host node-a``."""
    if subject.startswith("host "):
        return subject.removeprefix("host ")
    return subject.partition(" on ")[2] or None if subject.startswith("GPU ") else None


class AlertSink:
    """Writes the run's alerts.jsonl; a sink of :class:`~monitoring.watch.run_watcher.RunWatcher`.

    Args:
        path: alerts.jsonl; made with the first alert. What it left raised is not raised again.
        settings: thresholds.
        interval_s: seconds between samples.
        warn: called with one line where the file can't be read.
    """

    def __init__(
        self,
        path: Path,
        settings: AlertsSection,
        interval_s: float,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._path = path
        self._log: MetricsLog | None = None
        self._alerts = Alerts(settings, interval_s, _still_raised(path, warn))

    def write(self, record: Record) -> None:
        """Take one record."""
        self._append(self._alerts.take(record))

    def tick(self) -> None:
        """Look for silent workers."""
        self._append(self._alerts.tick())

    def close(self) -> None:
        """Close the file."""
        if self._log is not None:
            self._log.close()

    def _append(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            self._log = self._log or MetricsLog(self._path)
            self._log.append(alert.record())


def _still_raised(path: Path, warn: Callable[[str], None]) -> set[tuple[str, str]]:
    """Name and subject of the alerts that the file leaves raised."""
    if not path.exists():
        return set()
    try:
        records = read_metrics(path)
    except DataError as error:
        warn(f"{error}; alerts begin anew")
        return set()
    last = {(str(r.get("name")), str(r.get("subject"))): r.get("state") for r in records}
    return {key for key, state in last.items() if state == "raised"}
