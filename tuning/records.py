"""The folder of a search, and its trials: a file each, written where a trial ran before Ray Tune hears of its result.

Ray Tune (2.60) saves its own state some seconds later: a search that is killed would repeat what was measured since.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.publishing import write_atomically
from esmeray.run_folder.paths import RunFolder
from esmeray.training.config import Config
from esmeray.tuning.section import TuneConfig
from esmeray.tuning.settings import Measurement, Settings


class StoppedError(Exception):
    """The search is to end, and its trials with it."""


class SearchFolder(RunFolder):
    """Paths of a search, which lies among the runs."""

    def __init__(self, storage_path: str | Path, name: str) -> None:
        super().__init__(storage_path, name)
        if self.uri is not None:
            raise ConfigError(f"run.storage_path: a search needs a folder that every node sees, not {storage_path}")
        self.tune = self.path / "tune.yaml"
        self.hardware = self.path / "hardware.txt"
        self.trials = self.path / "trials"
        self.best = self.path / "best.yaml"
        self.report = self.path / "tune_report.html"
        self.ray_tune = self.path / "ray_tune"


@dataclass(frozen=True)
class Job:
    """An experiment, with absolute paths, and the search over it; ``store_path`` once its data is prepared.

    ``make_group`` makes of :class:`~esmeray.cluster.placement.Workers` what has the methods of
    :class:`~esmeray.tuning.workers.WorkerGroup`; None for that itself.
    """

    config: Config
    search: TuneConfig
    make_group: Callable[..., Any] | None = None
    store_path: str = ""

    @property
    def folder(self) -> SearchFolder:
        return SearchFolder(self.config.run.storage_path, self.search.name)

    @property
    def measured(self) -> Config:
        """The experiment of trials: what they write is the search's, as a classifier's tokenizer in a run's folder."""
        return self.config.model_copy(update={"run": self.config.run.model_copy(update={"name": self.search.name})})


@dataclass(frozen=True)
class Trial:
    """A configuration and its result; ``id`` is Ray Tune's, ``number`` counts trials as they ended, from 1."""

    id: str
    number: int
    settings: Settings
    measurement: Measurement


def write_trial(folder: Path, trial_id: str, settings: Settings, measurement: Measurement) -> None:
    """Write a trial's file; it is on disk when this returns."""
    record = {"time": time.time(), "settings": asdict(settings), "measurement": asdict(measurement)}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{trial_id}.json", json.dumps(record, indent=1) + "\n")


def read_trials(folder: Path) -> list[Trial]:
    """Return the trials of a search in the order in which they ended; DataError for a file that holds none."""
    records = sorted(((_read(path), path.stem) for path in folder.glob("*.json")), key=lambda pair: pair[0]["time"])
    return [
        Trial(trial_id, number, Settings(**record["settings"]), Measurement(**record["measurement"]))
        for number, (record, trial_id) in enumerate(records, start=1)
    ]


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
        Settings(**record["settings"]), Measurement(**record["measurement"])
        float(record["time"])
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: no trial of this version ({error!r}); choose another --tune.name") from error
    return record
