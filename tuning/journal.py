"""trials.jsonl: one JSON object a line for each trial of a search, from which the search is resumed.

Each line is on disk before the next trial begins, so that a killed search loses only the trial in progress. A
configuration that was measured more than once has as many lines.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from common.errors import DataError
from run_folder.metrics_log import encode_record
from tuning.settings import Measurement, Settings


@dataclass(frozen=True)
class Trial:
    """A configuration and its result.

    Attributes:
        number: in the order of the search, from 1.
        settings, measurement: what was tried and its result.
        phase: of the search: bracket, refine, sample, grid or confirm.
        time: when it ended, Unix seconds.
    """

    number: int
    settings: Settings
    measurement: Measurement
    phase: str
    time: float = field(default_factory=time.time)

    def record(self) -> dict[str, Any]:
        """The line of trials.jsonl, as plain values."""
        return {
            "trial": self.number,
            "settings": asdict(self.settings),
            "measurement": asdict(self.measurement),
            "phase": self.phase,
            "time": self.time,
        }


def together(trials: Sequence[Measurement]) -> Measurement:
    """Return one result of all trials of a configuration: their mean speed and largest peak, or the last failure."""
    last = trials[-1]
    speeds = [trial.tokens_per_s for trial in trials if trial.tokens_per_s]
    if len(trials) == 1 or last.status not in ("ok", "pruned") or not last.tokens_per_s:
        return last
    return replace(
        last,
        status="ok" if any(trial.status == "ok" for trial in trials) else "pruned",
        reason=f"{', '.join(f'{speed:,.0f}' for speed in speeds)} tokens/s in {len(speeds)} trials",
        tokens_per_s=statistics.mean(speeds),
        windows=[window for trial in trials for window in trial.windows],
        peak_memory_bytes=max((t.peak_memory_bytes for t in trials if t.peak_memory_bytes is not None), default=None),
        seconds=sum(trial.seconds for trial in trials),
    )


class TrialJournal:
    """The trials of a search, kept on disk.

    Args:
        path: trials.jsonl, made with the first trial. A partial last line, left by a killed process, is dropped.

    Raises:
        DataError: a line is no trial.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials: list[Trial] = []
        if path.exists():
            self._read()

    def add(self, settings: Settings, measurement: Measurement, phase: str) -> Trial:
        """Append a trial; it is on disk when this returns."""
        trial = Trial(len(self.trials) + 1, settings, measurement, phase)
        line = encode_record(trial.record())
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if os.write(descriptor, line) != len(line):
                raise OSError(f"{self.path}: a trial was written in part; is the disk full?")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.trials.append(trial)
        return trial

    def measured(self) -> dict[Settings, list[Measurement]]:
        """Return the measurements of each configuration in their order."""
        known: dict[Settings, list[Measurement]] = {}
        for trial in self.trials:
            known.setdefault(trial.settings, []).append(trial.measurement)
        return known

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))
        for number, line in enumerate(whole.splitlines(), start=1):
            self.trials.append(_decode(line, self.path, number))


def _decode(line: bytes, path: Path, number: int) -> Trial:
    try:
        record = json.loads(line)
        return Trial(
            record["trial"],
            _made(Settings, record["settings"]),
            _made(Measurement, _with_nan(record["measurement"])),
            record["phase"],
            record["time"],
        )
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path}, line {number}: not a trial of this version ({error!r}); choose another --tune.name, or move the "
            "file away"
        ) from error


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    if missing := {item.name for item in fields(kind)} ^ set(values):
        raise ValueError(f"{kind.__name__} has other fields: {', '.join(sorted(missing))}")
    return kind(**values)


def _with_nan(measurement: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN: windows that were none are null in the file."""
    windows = [math.nan if window is None else window for window in measurement["windows"]]
    return measurement | {"windows": windows}
