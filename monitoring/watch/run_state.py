"""State of a run as its files show it, for :mod:`monitoring.watch.run_view`.

The folder need not be there yet, may be written to meanwhile, and may be on another machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from monitoring.watch.pace import Pace
from run_folder.metrics_log import Record
from run_folder.paths import Outcome, RunFolder, sample_files
from run_folder.tail import RecordTail

_RECENT_BYTES, _SAMPLES_BYTES = 4 << 20, 1 << 18
"""Ends of the metrics and of a worker's samples that are read; of the latter the last one alone is shown."""
_MOST_STEPS = 20_000
"""Logged steps that are kept for the curves."""
_QUIET_S = 60.0
"""Without news for this long, or three usual steps if longer, a run that has not ended is quiet."""
STEP_PARTS = ("data_wait", "forward", "backward", "optimizer", "communication", "checkpoint")


@dataclass(frozen=True)
class Status:
    """Status of a run: "not begun", "starting", "running", "quiet", "crashed", or how it ended; and a note."""

    word: str
    note: str = ""


@dataclass(frozen=True)
class Worker:
    """The last sample of a worker, taken at ``time`` (Unix seconds)."""

    rank: int
    host: str
    step: int
    time: float
    metrics: Mapping[str, float]


class RunState:
    """A run; :meth:`update` reads what is new.

    Attributes:
        config: its config.yaml; empty while it can't be read.
        broken_off: the process that trained has ended without an outcome.
        steps: records of training steps, in order; of a long run the recent ones.
        pace: speed of the last ones.
        total_steps: of the whole run; None while it is not known.
        validation, event: the last records of these kinds.
        workers: the last sample of each, by rank.
        hosts: the last sample of each machine, by name.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder).resolve()
        self.files = RunFolder(folder.parent, folder.name)
        self.config: Mapping[str, Any] = {}
        self.outcome: Outcome | None = None
        self.broken_off = False
        self.steps: list[Record] = []
        self.pace = Pace()
        self.total_steps: int | None = None
        self.validation: Record | None = None
        self.event: Record | None = None
        self.workers: dict[int, Worker] = {}
        self.hosts: dict[str, Mapping[str, float]] = {}
        self._alerts: dict[tuple[str, str], Record] = {}
        self._first_s, self._last_s = float("inf"), 0.0
        self._tails = {
            path: RecordTail(path, recent_bytes=_RECENT_BYTES) for path in (self.files.metrics, self.files.alerts)
        }

    def update(self) -> None:
        """Read what is new."""
        for path in sample_files(self.files.monitoring):
            self._tails.setdefault(path, RecordTail(path, recent_bytes=_SAMPLES_BYTES))
        for tail in self._tails.values():
            for record in tail.poll():
                self._take(record)
        with contextlib.suppress(OSError, UnicodeDecodeError, yaml.YAMLError):  # half-written: it is read again
            config = yaml.safe_load(self.files.config.read_text(encoding="utf-8"))
            self.config = config if isinstance(config, dict) else {}
        lock_is_free = _is_unlocked(self.files.lock)  # before the outcome, which is written while it is held
        with contextlib.suppress(OSError):
            self.outcome = self.files.read_outcome()
        self.broken_off = lock_is_free and self.outcome is None

    @property
    def name(self) -> str:
        """Name of the run."""
        section = self.config.get("run")
        return str((section.get("name") if isinstance(section, dict) else None) or self.files.path.name)

    @property
    def step(self) -> int:
        """The last logged step."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def alerts(self) -> list[Record]:
        """The last alert of each name and subject: those that still hold first, then the latest first."""
        return sorted(self._alerts.values(), key=lambda alert: (alert.get("state") == "cleared", -alert["time"]))

    @property
    def problems(self) -> list[str]:
        """Files and lines that could not be read, in words."""
        found = [tail.failure for tail in self._tails.values() if tail.failure]
        damaged = sum(tail.damaged for tail in self._tails.values())
        return found + ([f"{damaged} damaged line{'s' if damaged > 1 else ''} passed over"] if damaged else [])

    @property
    def has_ended(self) -> bool:
        """True when nothing more comes, unless the run is resumed."""
        return self.outcome is not None or self.broken_off

    def moment(self, now: float) -> float:
        """Return the time to which ages are counted: now, or the end of a run that has ended."""
        return self._last_s if self.has_ended and self._last_s else max(now, self._last_s)

    def status(self, now: float) -> Status:
        """Return the status at ``now``, Unix seconds."""
        if self.outcome is not None:
            return Status(self.outcome.status, self.outcome.message)
        if self.broken_off:
            return Status("crashed", "its process ended without an outcome (killed?); the same command resumes it")
        if not self._last_s:
            if self.files.exists:
                return Status("starting", "no step is done yet")
            return Status("not begun", "it has no config.yaml yet")
        if now - self._last_s > max(_QUIET_S, 3 * (self.pace.seconds_per_step() or 0.0)):
            return Status("quiet", "validating for long, or ended without notice")
        return Status("running" if self.steps else "starting")

    def elapsed_s(self, now: float) -> float | None:
        """Return the time since the first record."""
        return max(0.0, self.moment(now) - self._first_s) if self._last_s else None

    def left_s(self) -> float | None:
        """Return the time left at the pace of the last steps; None while it is not known, or nothing is left."""
        return None if self.has_ended or not self.steps else self.pace.seconds_left(self.total_steps)

    def step_split(self) -> dict[str, float]:
        """Return the seconds of a step that each part takes; "other" is what no part covers.

        Checkpoints lie between steps.
        """
        whole = self.pace.mean("step_s")
        if whole is None:
            return {}
        means = {part: self.pace.mean(f"{part}_s") for part in STEP_PARTS}
        split = {part: mean for part, mean in means.items() if mean is not None}
        within = sum(value for part, value in split.items() if part != "checkpoint")
        return {**split, "other": max(0.0, whole - within)}

    def _take(self, record: Record) -> None:
        self.pace.take(record)
        if time_s := record.get("time"):
            self._first_s, self._last_s = min(self._first_s, time_s), max(self._last_s, time_s)
        if record["kind"] == "train":
            self._forget_steps(record["step"] - 1)  # resumed, and done again
            self.steps.append(record)
            if len(self.steps) > _MOST_STEPS:
                del self.steps[: _MOST_STEPS // 10]
        elif record["kind"] == "validation":
            self.validation = record
        elif record["kind"] == "event":
            self.event = record
            self.total_steps = record.get("total_steps", self.total_steps)
            if record.get("event") == "resumed":
                self._forget_steps(record["step"])
        elif record["kind"] == "alert":
            self._alerts[str(record.get("name")), str(record.get("subject", ""))] = record
        elif record["kind"] == "sample":
            self._take_sample(record)

    def _forget_steps(self, after: int) -> None:
        while self.steps and self.steps[-1]["step"] > after:
            self.steps.pop()

    def _take_sample(self, record: Record) -> None:
        known = {name: value for name, value in record["metrics"].items() if isinstance(value, int | float)}
        host, rank = str(record["host"]), record["worker"]
        self.workers[rank] = Worker(rank, host, record["step"], record["time"], known)
        there = {worker.host for worker in self.workers.values()}
        self.hosts = {name: metrics for name, metrics in self.hosts.items() if name in there}
        if any(name.startswith(("gpu/", "mem/host_total")) for name in known):
            self.hosts[host] = known


def _is_unlocked(path: Path) -> bool:
    """Test for a lock that its process, of this host, holds no more; False where that can't be known.

    A lock that another host holds may not be seen through shared storage; the file ends in that host's name.
    """
    try:
        with path.open() as file:
            if file.read().split()[-1:] != [socket.gethostname()]:
                return False
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or no such file, or a storage without locks
        return False
    return True
