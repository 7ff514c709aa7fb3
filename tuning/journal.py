"""trials.jsonl: one JSON object a line for each trial of a search, from which the search is resumed.

Each line is on disk before the next trial begins, so that a killed search loses only the trial in progress.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from common.errors import DataError
from run_folder.metrics_log import encode_record
from tuning.settings import Measurement, Settings


@dataclass(frozen=True)
class Trial:
    """A configuration and its result.

    Attributes:
        trial: its number, in the order of the search, from 1.
        phase: of the search: bracket, refine, sample, grid or confirm.
        time: when it ended, Unix seconds.
    """

    trial: int
    settings: Settings
    measurement: Measurement
    phase: str
    time: float = field(default_factory=time.time)


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

    A partial last line, left by a killed process, is dropped. Raises DataError where a line is no trial.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials: list[Trial] = []
        if path.exists():
            self._read()

    def add(self, settings: Settings, measurement: Measurement, phase: str) -> None:
        """Append a trial; it is on disk when this returns."""
        trial = Trial(len(self.trials) + 1, settings, measurement, phase)
        with self.path.open("ab") as file:
            file.write(encode_record(asdict(trial)))
            file.flush()
            os.fsync(file.fileno())
        self.trials.append(trial)

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))
        try:
            for line in whole.splitlines():
                record = json.loads(line)
                record["settings"] = Settings(**record["settings"])
                record["measurement"] = Measurement(**record["measurement"])
                self.trials.append(Trial(**record))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{self.path}, line {len(self.trials) + 1}: not a trial of this version ({error!r}); choose another "
                "--tune.name, or move the file away"
            ) from error
