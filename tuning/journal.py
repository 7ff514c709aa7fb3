"""trials.jsonl: what every trial of a throughput search did, one JSON object a line; a search goes on from it.

Each line is on disk before the next trial begins, so that a killed search loses the trial in progress alone. What
stands here is not measured again by a search that goes on. A configuration that was measured more than once has as many
lines, each with what that trial gave.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from common.errors import DataError
from run_folder.metrics_log import encode_record
from tuning.settings import Measurement, Settings


@dataclass(frozen=True)
class Trial:
    """One configuration of a search and what came of it.

    Attributes:
        number: in the order of the search, from 1.
        settings: what was tried.
        measurement: what it gave.
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


def was_measured(measurement: Measurement) -> bool:
    """Whether steps were taken or tried for it; not so of what an earlier trial answered."""
    return measurement.status != "pruned" or bool(measurement.windows)


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
        """What need not be measured again: of each configuration its measurements in their order."""
        known: dict[Settings, list[Measurement]] = {}
        for trial in self.trials:
            if was_measured(trial.measurement):
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
