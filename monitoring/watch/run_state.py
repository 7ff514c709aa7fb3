"""What is known of a run from its files, at a moment: how far it is, how fast, on what, and what was warned of.

In: the folder of a run, which need not be there yet, may be written to meanwhile, and may be on another machine. Out:
:class:`RunState`, brought up to date by :meth:`RunState.update`. How it looks on a terminal is left to
:mod:`monitoring.watch.run_view`.
"""

from __future__ import annotations

import fcntl
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from run_folder.metrics_log import Record
from run_folder.recent_records import RecentRecords

RATE_STEPS = 50
"""Logged steps over which speed, the split of a step and the time left are averaged."""
MOST_STEPS = 20_000
"""Logged steps that are kept for the curves."""
SAMPLES_BYTES = 1 << 18
"""Of a worker's samples, of which the last alone is shown."""
QUIET_S = 60.0
"""Without news for this long, a run that has not ended is said to be quiet; or three times the usual, if longer."""
LOCK = ".lock"
"""The file that the process which trains holds a lock on."""
STEP_PARTS = ("data_wait", "forward", "backward", "optimizer", "communication", "checkpoint")


@dataclass(frozen=True)
class Status:
    """How a run stands.

    Attributes:
        word: "not begun", "starting", "running", "quiet", "broken off", or how it ended.
        note: more of it, for a person.
    """

    word: str
    note: str = ""


@dataclass
class Worker:
    """The last sample of a worker, and when it and the one before were taken (Unix seconds)."""

    rank: int
    host: str
    step: int
    time: float
    figures: Mapping[str, float]


class RunState:
    """A run as its files tell.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._metrics = RecentRecords(self.folder / "metrics.jsonl")
        self._alerts = RecentRecords(self.folder / "alerts.jsonl")
        self._samples: dict[Path, RecentRecords] = {}
        self._config_text = ""
        self.config: Mapping[str, Any] = {}
        self.outcome: Mapping[str, Any] | None = None
        self.broken_off = False
        """The process that trained has ended without an outcome."""
        self.workers: dict[int, Worker] = {}
        self.hosts: dict[str, Mapping[str, float]] = {}
        self._seen = _Seen()

    def update(self) -> None:
        """Read what is new."""
        restarts = self._metrics.restarts
        records = self._metrics.poll()
        if self._metrics.restarts > restarts:
            self._seen.forget_metrics()
        for record in records:
            self._seen.take(record)
        for record in self._alerts.poll():
            self._seen.take_alert(record)
        for path in self._sample_files():
            tail = self._samples.setdefault(path, RecentRecords(path, SAMPLES_BYTES))
            for record in tail.poll():
                self._take_sample(record)
        self._read_config()
        # Before the outcome, which is written while the lock is held.
        lock_is_free = _is_unlocked(self.folder / LOCK)
        self.outcome = _read_object(self.folder / "outcome.json")
        self.broken_off = lock_is_free and self.outcome is None

    @property
    def name(self) -> str:
        """Of the run."""
        return str(_at(self.config, "run", "name") or self.folder.resolve().name)

    @property
    def step(self) -> int:
        """The last that was logged."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def total_steps(self) -> int | None:
        """Of the whole run; None while it is not known."""
        return self._seen.total_steps

    @property
    def epoch(self) -> int | None:
        """Of the last step, from 0."""
        return self.steps[-1].get("epoch") if self.steps else None

    @property
    def steps(self) -> Sequence[Record]:
        """Records of training steps, in order; of a long run the recent ones."""
        return self._seen.steps

    @property
    def validation(self) -> Record | None:
        """The last."""
        return self._seen.validation

    @property
    def event(self) -> Record | None:
        """The last."""
        return self._seen.event

    @property
    def alerts(self) -> list[Record]:
        """The last of each name and subject: those that still hold first, then by time, latest first."""
        return sorted(self._seen.alerts.values(), key=lambda alert: (alert.get("state") == "cleared", -_time(alert)))

    @property
    def troubles(self) -> list[str]:
        """What of the files could not be read."""
        tails = [self._metrics, self._alerts, *self._samples.values()]
        found = [tail.failure for tail in tails if tail.failure]
        damaged = sum(tail.damaged for tail in tails)
        return found + ([f"{damaged} damaged line{'s' if damaged > 1 else ''} passed over"] if damaged else [])

    @property
    def has_ended(self) -> bool:
        """True when nothing more comes, unless the run is resumed."""
        return self.outcome is not None or self.broken_off

    def last_news(self) -> float | None:
        """Unix seconds of the latest record."""
        times = [self._seen.last_s, *(worker.time for worker in self.workers.values())]
        latest = max(times)
        return latest if latest > 0 else None

    def moment(self, now: float) -> float:
        """What ages are counted to: now, or the end of a run that has ended."""
        news = self.last_news()
        return news if self.has_ended and news is not None else max(now, news or now)

    def status(self, now: float) -> Status:
        """How the run stands at ``now`` (Unix seconds)."""
        if self.outcome is not None:
            return Status(str(self.outcome.get("status", "ended")), str(self.outcome.get("message", "")))
        if self.broken_off:
            return Status("broken off", "its process ended without an outcome (killed?); the same command resumes it")
        news = self.last_news()
        if news is None:
            if self._config_text:
                return Status("starting", "no step is done yet")
            there = "it has no config.yaml yet" if self.folder.is_dir() else "its folder is not there yet"
            return Status("not begun", there)
        usual = 3 * (self.seconds_per_step() or 0.0)
        if now - news > max(QUIET_S, usual):
            return Status("quiet", "validating for long, or gone without a word")
        return Status("running" if self.steps else "starting")

    def elapsed_s(self, now: float) -> float | None:
        """Since the first record."""
        return None if self._seen.first_s is None else max(0.0, self.moment(now) - self._seen.first_s)

    def left_s(self) -> float | None:
        """At the pace of the last steps; None while it is unknown, or nothing is left."""
        step_s = self.seconds_per_step()
        if step_s is None or self.total_steps is None or self.has_ended:
            return None
        return max(0.0, step_s * (self.total_steps - self.step))

    def seconds_per_step(self) -> float | None:
        """By the clock, validations and checkpoints included."""
        recent = self._recent()
        if len(recent) < 2:
            return recent[0].get("step_s") if recent else None
        return max(0.0, (_time(recent[-1]) - _time(recent[0])) / max(1, recent[-1]["step"] - recent[0]["step"]))

    def tokens_per_s(self) -> float | None:
        """Harmonic mean of the last steps: tokens over time, as they are of like size."""
        rates = [rate for record in self._recent() if (rate := record.get("tokens_per_s"))]
        return len(rates) / sum(1 / rate for rate in rates) if rates else None

    def figure(self, name: str) -> float | None:
        """A figure of the run (``perf/mfu``) from the samples of worker 0."""
        worker = self.workers.get(0)
        return None if worker is None else worker.figures.get(name)

    def step_split(self) -> dict[str, float]:
        """Seconds of a step that each part takes, on average of the last ones; "other" is what no part covers."""
        recent = self._recent()
        whole = _mean([record.get("step_s") for record in recent])
        if whole is None:
            return {}
        parts = {name: _mean([record.get(f"{name}_s") for record in recent]) for name in STEP_PARTS}
        for name in STEP_PARTS:
            if parts[name] is None:
                parts[name] = _mean(
                    [worker.figures.get(f"worker/{rank}/{name}_s") for rank, worker in self.workers.items()]
                )
        known = {name: value for name, value in parts.items() if value is not None}
        within = sum(value for name, value in known.items() if name != "checkpoint")  # which lies between steps
        return {**known, "other": max(0.0, whole - within)}

    def _recent(self) -> Sequence[Record]:
        """The last steps, without those from before a restart: what lies between is no part of a step."""
        recent = self.steps[-RATE_STEPS:]
        return [record for record in recent if _time(record) >= self._seen.begun_s] or recent[-1:]

    def _sample_files(self) -> list[Path]:
        try:
            return sorted((self.folder / "monitoring").glob("worker-*.jsonl"))
        except OSError:  # a remote folder that is away for a while
            return list(self._samples)

    def _take_sample(self, record: Record) -> None:
        figures, rank = record.get("figures"), record.get("worker")
        if not isinstance(figures, dict) or not isinstance(rank, int):
            return
        known = {name: value for name, value in figures.items() if isinstance(value, int | float)}
        host = str(record.get("host", ""))
        self.workers[rank] = Worker(rank, host, record["step"], _time(record), known)
        there = {worker.host for worker in self.workers.values()}
        self.hosts = {name: figures for name, figures in self.hosts.items() if name in there}
        if any(name.startswith(("gpu/", "mem/host_total")) for name in known):
            self.hosts[host] = known

    def _read_config(self) -> None:
        try:
            text = (self.folder / "config.yaml").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return
        if text != self._config_text:
            self._config_text = text
            try:
                config = yaml.safe_load(text)
            except yaml.YAMLError:
                return  # half-written: it will be read again when it is whole
            self.config = config if isinstance(config, dict) else {}


@dataclass
class _Seen:
    """What the records so far amount to."""

    total_steps: int | None = None
    steps: list[Record] = field(default_factory=list)
    validation: Record | None = None
    event: Record | None = None
    alerts: dict[tuple[str, str], Record] = field(default_factory=dict)
    first_s: float | None = None
    begun_s: float = 0.0
    """When the workers began the last time."""
    last_s: float = 0.0

    def forget_metrics(self) -> None:
        """metrics.jsonl begins anew."""
        self.steps, self.validation, self.event, self.first_s = [], None, None, None

    def take(self, record: Record) -> None:
        self._note_time(record)
        if record["kind"] == "train":
            while self.steps and self.steps[-1]["step"] >= record["step"]:  # resumed, and done again
                self.steps.pop()
            self.steps.append(record)
            if len(self.steps) > MOST_STEPS:
                del self.steps[: MOST_STEPS // 10]
        elif record["kind"] == "validation":
            self.validation = record
        elif record["kind"] == "event":
            self.event = record
            if record.get("event") in ("started", "resumed"):
                self.begun_s = _time(record)
            self.total_steps = record.get("total_steps", self.total_steps)

    def take_alert(self, record: Record) -> None:
        self._note_time(record)
        if record["kind"] == "alert":
            self.alerts[str(record.get("name")), str(record.get("subject", ""))] = record

    def _note_time(self, record: Record) -> None:
        time_s = _time(record)
        if time_s > 0:
            self.first_s = time_s if self.first_s is None else min(self.first_s, time_s)
            self.last_s = max(self.last_s, time_s)


def _time(record: Record) -> float:
    value = record.get("time")
    return float(value) if isinstance(value, int | float) else 0.0


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _read_object(path: Path) -> Mapping[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # not there, or half-written: it is read again
    return value if isinstance(value, dict) else None


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


def _at(config: Mapping[str, Any], *keys: str) -> Any:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
