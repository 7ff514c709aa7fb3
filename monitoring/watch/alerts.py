"""Alerts of a run: each is raised once, and again only after what it reports was over.

:mod:`monitoring.watch.alert_rules` finds what holds in a record; here is how long it must last. :class:`AlertSink`
appends alerts to the run's alerts.jsonl, which whoever shows or sends them follows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from monitoring.watch.alert_rules import Finding, OwnGpus, Rule, rules
from run_folder.metrics_log import MetricsLog, Record
from run_folder.tail import RecordTail
from train_config.monitoring_schema import AlertsSection

SILENT_WORKER = "silent_worker"
MISSED_SAMPLES = 3
"""Samples that may be missing before a worker counts as silent or a span of time as not watched."""
ENDS = frozenset({"finished", "stopped", "failed", "diverged"})
"""Events after which workers fall silent as they should."""


@dataclass(frozen=True)
class Alert:
    """A warning (by its rule's name or SILENT_WORKER) about a GPU, machine or worker, or that its cause is over.

    ``step``: last logged; ``time``: Unix seconds.
    """

    name: str
    subject: str
    state: Literal["raised", "cleared"]
    message: str
    step: int
    time: float


@dataclass
class _Latch:
    """Raised once something has lasted, cleared once its end has; silent in between."""

    raised: bool = False
    _since_s: float | None = None
    _seen_s: float = -math.inf

    def update(self, time_s: float, holds: bool | None, lasts_s: float, gap_s: float) -> bool:
        """Take a look at ``time_s``; return whether this changes it.

        It must hold, or be over, for ``lasts_s``; ``holds`` is None between the thresholds. Of a longer time than
        ``gap_s`` between two looks nobody knows what was in between.
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
    """Turns records into alerts; samples come every ``interval_s``. ``clock`` gives seconds; for tests."""

    def __init__(self, settings: AlertsSection, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules: list[Rule] = rules(settings)
        self._missed_s = MISSED_SAMPLES * interval_s
        self._silence_s = max(settings.silent_worker_s, self._missed_s)
        self._clock = clock
        self._latches: dict[tuple[str, str], _Latch] = {}
        self._heard: dict[str, tuple[float, int]] = {}  # by worker: when, and its step
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
        return alerts

    def _listen(self, record: Record) -> list[Alert]:
        if record["kind"] == "event" and record["event"] in ENDS:
            self._heard.clear()
        if record["kind"] != "sample":
            return []
        worker = f"worker {record['worker']}"
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


class AlertSink:
    """Writes the run's alerts.jsonl; a sink of :class:`~monitoring.watch.run_watcher.RunWatcher`.

    ``path`` is made with the first alert. What an earlier start of the run left raised is cleared.
    """

    def __init__(self, path: Path, settings: AlertsSection, interval_s: float) -> None:
        self._path = path
        self._log: MetricsLog | None = None
        self._alerts = Alerts(settings, interval_s)
        last = {(record.get("name"), record.get("subject")): record for record in RecordTail(path).poll()}
        over = {"state": "cleared", "message": "the run was started again", "time": time.time()}
        self._append(record | over for record in last.values() if record.get("state") == "raised")

    def write(self, record: Record) -> None:
        """Take one record."""
        self._append({"kind": "alert", **vars(alert)} for alert in self._alerts.take(record))

    def tick(self) -> None:
        """Look for silent workers."""
        self._append({"kind": "alert", **vars(alert)} for alert in self._alerts.tick())

    def close(self) -> None:
        """Close the file."""
        if self._log is not None:
            self._log.close()

    def _append(self, alerts: Iterable[Record]) -> None:
        for alert in alerts:
            self._log = self._log or MetricsLog(self._path)
            self._log.append(alert)
