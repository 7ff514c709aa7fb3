"""The trials of a throughput search as its pictures and its report see them.

In: the lines of trials.jsonl, decoded. Out: :class:`Trial` and what is asked of many: the fastest that fits, those
that no other beats in both speed and memory, those that differ from another in one setting. A configuration is written
in words here, so that every place says it alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeAlias

Value: TypeAlias = int | float | str | bool | None
Space: TypeAlias = Mapping[str, Sequence[Value]]
"""The values of each setting that a search may take."""

NAMES = {
    "tokens": "token budget",
    "batch_size": "sequences a batch",
    "num_workers": "loader processes",
    "prefetch": "prefetched batches",
    "amp_dtype": "precision",
    "gradient_checkpointing": "checkpointing",
    "compile": "compile",
    "stage": "ZeRO stage",
    "workers": "workers",
}
"""Settings in the order and the words in which they are shown."""

STATUSES = {
    "ok": "measured",
    "pruned": "stopped early",
    "out_of_memory": "out of memory",
    "crash": "crashed",
    "timeout": "hung",
    "nan": "NaN",
    "refused": "refused",
}
"""What can become of a trial, in words."""

RULED_OUT = "ruled out"
"""A configuration that was not measured, since another one told what would come of it."""

NOISY = 1.1
"""From this ratio of the fastest window to the slowest on, a speed is not told without its windows."""

_PRECISIONS = {"none": "fp32"}


@dataclass(frozen=True)
class Trial:
    """One configuration and what measuring it gave.

    Attributes:
        number: in the order of the search.
        settings: by the names of :data:`NAMES`.
        status: one of :data:`STATUSES`.
        reason: a line for a person.
        tokens_per_s: real tokens a second over all workers; of a trial that was stopped early those of its windows so
            far, in the median; None where nothing was measured.
        peak_bytes, total_bytes: memory, the largest over the workers; None where not known.
        shares: of a step, by phase: data_wait, forward, backward, optimizer, communication.
        seconds: that the trial took.
        phase: of the search: bracket, refine, sample, grid or confirm.
        windows: tokens a second of each stretch of steps that was timed.
    """

    number: int
    settings: Mapping[str, Value]
    status: str
    reason: str
    tokens_per_s: float | None
    peak_bytes: int | None
    total_bytes: int | None
    shares: Mapping[str, float]
    seconds: float
    phase: str
    windows: tuple[float, ...] = ()

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Trial:
        """Read a line of trials.jsonl.

        Raises:
            KeyError: it has no settings or no measurement.
        """
        measurement = record["measurement"]
        speed = measurement.get("tokens_per_s")
        timed = [float(window) for window in measurement.get("windows") or [] if window is not None]
        windows = tuple(window for window in timed if math.isfinite(window))
        if speed is None and measurement["status"] == "pruned" and windows:
            speed = median(windows)
        return cls(
            number=int(record.get("trial", 0)),
            settings=dict(record["settings"]),
            status=measurement["status"],
            reason=measurement.get("reason") or "",
            tokens_per_s=float(speed) if speed is not None and math.isfinite(speed) else None,
            peak_bytes=measurement.get("peak_memory_bytes"),
            total_bytes=measurement.get("total_memory_bytes"),
            shares={name: float(share) for name, share in (measurement.get("shares") or {}).items()},
            seconds=float(measurement.get("seconds") or 0.0),
            phase=record.get("phase") or "",
            windows=windows,
        )

    @property
    def is_ruled_out(self) -> bool:
        """Whether it was concluded from others rather than measured."""
        return self.status == "pruned" and self.tokens_per_s is None

    @property
    def outcome(self) -> str:
        """What became of it, in words."""
        return RULED_OUT if self.is_ruled_out else STATUSES.get(self.status, self.status)

    @property
    def memory_share(self) -> float | None:
        """Peak as a share of the device's memory."""
        if self.peak_bytes is None or not self.total_bytes:
            return None
        return self.peak_bytes / self.total_bytes

    def fits(self, margin: float) -> bool:
        """Whether its peak leaves this share of the memory free; where the peak is not known, it does."""
        return self.memory_share is None or self.memory_share <= 1.0 - margin


def read_trials(records: Sequence[Mapping[str, Any]]) -> list[Trial]:
    """The trials of a search in their order; of a configuration with several the last, which knows of the others."""
    last: dict[tuple[tuple[str, Value], ...], Trial] = {}
    for trial in map(Trial.from_record, records):
        key = tuple(sorted(trial.settings.items()))
        last.pop(key, None)
        last[key] = trial
    return list(last.values())


def completed(trials: Sequence[Trial]) -> list[Trial]:
    """Those that were measured to the end."""
    return [trial for trial in trials if trial.status == "ok" and trial.tokens_per_s is not None]


def measured(trials: Sequence[Trial]) -> list[Trial]:
    """Those whose speed is known, the ones that were stopped early among them."""
    return [trial for trial in trials if trial.status in ("ok", "pruned") and trial.tokens_per_s is not None]


def speed(trial: Trial) -> float:
    """Tokens a second; 0 where nothing was measured."""
    return trial.tokens_per_s or 0.0


def best_trial(trials: Sequence[Trial], margin: float) -> Trial | None:
    """The fastest that was measured to the end and leaves ``margin`` of the memory free; None where none does."""
    return max((trial for trial in completed(trials) if trial.fits(margin)), key=speed, default=None)


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Those measured to the end that no other of them beats in both speed and memory, the fastest first."""
    front: list[Trial] = []
    known = [trial for trial in completed(trials) if trial.peak_bytes is not None]
    for trial in sorted(known, key=lambda trial: (-speed(trial), trial.peak_bytes)):
        if not front or trial.peak_bytes < front[-1].peak_bytes:  # type: ignore[operator]
            front.append(trial)
    return front


@dataclass(frozen=True)
class Search:
    """What pictures of a search are of.

    Attributes:
        trials: in order.
        space: values of each setting.
        margin: share of the memory that the best has to leave free.
        importance: share of each setting in what makes trials differ, 0 to 1; empty where not known.
        importance_method: how it was found.
    """

    trials: Sequence[Trial]
    space: Space
    margin: float
    importance: Mapping[str, float] = field(default_factory=dict)
    importance_method: str = ""

    @property
    def best(self) -> Trial | None:
        """The fastest that fits."""
        return best_trial(self.trials, self.margin)


def varied(trials: Sequence[Trial], space: Space) -> list[str]:
    """Settings that have more than one value, in the order of :data:`NAMES`."""
    return [name for name in NAMES if len(values_of(name, trials, space)) > 1]


def values_of(name: str, trials: Sequence[Trial], space: Space) -> list[Value]:
    """Values of a setting in order: those of the space and those that trials took beside it."""
    values = {*space.get(name, ()), *(trial.settings[name] for trial in trials if name in trial.settings)}
    return sorted(values, key=_order)


def neighbours(trial: Trial, trials: Sequence[Trial], name: str) -> list[Trial]:
    """Trials whose settings differ from those of ``trial`` in this one, in the order of its values."""
    others = [
        other
        for other in trials
        if other.settings.get(name) != trial.settings.get(name)
        and all(other.settings.get(key) == value for key, value in trial.settings.items() if key != name)
    ]
    return sorted(others, key=lambda other: _order(other.settings.get(name)))


def budget_setting(trials: Sequence[Trial], space: Space) -> str:
    """The setting that makes a batch larger: the token budget, or the sequences where only they are varied."""
    return "batch_size" if "batch_size" in varied(trials, space) and "tokens" not in varied(trials, space) else "tokens"


def value_text(name: str, value: Value) -> str:
    """A value as a person writes it."""
    if value is None:
        return "any"
    if isinstance(value, bool):
        return "on" if value else "off"
    if name == "amp_dtype":
        return _PRECISIONS.get(str(value), str(value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def settings_text(settings: Mapping[str, Value], names: Sequence[str]) -> str:
    """Settings in a line: ``token budget 8,192, precision bf16``."""
    return ", ".join(f"{NAMES[name]} {value_text(name, settings[name])}" for name in names if name in settings)


def noise_text(trial: Trial) -> str:
    """What has to follow a speed whose windows differ: `` (windows 22,100 to 25,300)``; nothing where they agree."""
    slowest, fastest = min(trial.windows, default=0.0), max(trial.windows, default=0.0)
    return f" (windows {slowest:,.0f} to {fastest:,.0f})" if fastest > NOISY * slowest else ""


def memory_text(size: float | None) -> str:
    """Bytes in GiB or MiB."""
    if size is None:
        return "not known"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _order(value: Value) -> tuple[int, float, str]:
    if value is None:
        return (2, 0.0, "")
    if isinstance(value, str):
        return (1, 0.0, value)
    return (0, float(value), "")
