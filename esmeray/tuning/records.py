"""Settings, measurements and trials of a search, its folder and its job."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from esmeray.cluster.placement import Workers
from esmeray.common.errors import ConfigError
from esmeray.run_folder.paths import RunFolder
from esmeray.training.config import Config
from esmeray.tuning.section import TuneConfig

Value: TypeAlias = int | str | None
Status: TypeAlias = Literal["ok", "out_of_memory", "crash", "timeout", "nan", "refused"]

_SETTINGS = {
    "tokens": ("batch.tokens", "token budget"),
    "workers": ("ray.num_workers", "workers"),
    "precision": ("training.precision", "precision"),
    "num_workers": ("data.num_workers", "loader processes"),
    "batch_size": ("batch.batch_size", "sequences per batch"),
}
"""Key in an experiment's config and label of each setting, in the usual order of importance."""

KEYS = {name: key for name, (key, _) in _SETTINGS.items()}
NAMES = {name: words for name, (_, words) in _SETTINGS.items()}

STATUSES: dict[Status, str] = {
    "ok": "measured",
    "out_of_memory": "out of memory",
    "crash": "crashed",
    "timeout": "hung",
    "nan": "NaN",
    "refused": "refused",
}
"""Labels of a trial's status."""


@dataclass(frozen=True)
class Settings:
    """A configuration of a search; each field corresponds to one key of the config (:data:`KEYS`)."""

    tokens: int
    batch_size: int | None
    num_workers: int
    precision: str
    workers: int


@dataclass(frozen=True)
class Measurement:
    """The result of a trial, which took ``seconds``.

    Attributes:
        status: ``refused``: the settings can't be run.
        tokens_per_s: real tokens of all workers.
        peak_memory_bytes: maximum over the workers.
        total_memory_bytes: memory of one device; on the CPU the limit of one worker.
        shares: share of a step's time by phase, mean over the workers.
    """

    status: Status
    reason: str
    tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None
    total_memory_bytes: int | None = None
    shares: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def speed(self, memory_margin: float) -> float:
        """Return tokens per second; 0 if the trial failed or used too much memory."""
        return (self.tokens_per_s or 0.0) if self.fits(memory_margin) else 0.0

    def fits(self, memory_margin: float) -> bool:
        """Test whether it ran and left the margin free."""
        return self.status == "ok" and (self.memory_share or 0.0) <= 1 - memory_margin

    def is_too_large(self, memory_margin: float) -> bool:
        """Test for out of memory, or less than the margin left free."""
        return self.status == "out_of_memory" or (self.memory_share or 0.0) > 1 - memory_margin

    @property
    def memory_share(self) -> float | None:
        """Peak as a share of the device's memory."""
        peak, total = self.peak_memory_bytes, self.total_memory_bytes
        return None if peak is None or not total else peak / total


@dataclass(frozen=True)
class Trial:
    """A configuration and its result. ``number`` counts trials in the order they ended, from 1."""

    number: int
    settings: Settings
    measurement: Measurement


class StoppedError(Exception):
    """Raised to end the search and its trials."""


class SearchFolder(RunFolder):
    """Paths of a search, in a folder next to the runs."""

    def __init__(self, storage_path: str | Path, name: str) -> None:
        super().__init__(storage_path, name)
        if self.uri is not None:
            # The driver resumes from the file of trials in it, and Ray Tune writes to it as well.
            raise ConfigError(f"run.storage_path: a search needs a folder that all nodes share, not {storage_path}")
        self.tune = self.path / "tune.yaml"
        self.hardware = self.path / "hardware.txt"
        self.trials = self.path / "trials.jsonl"
        self.table = self.path / "trials.csv"
        self.best = self.path / "best.yaml"
        self.ray_tune = self.path / "ray_tune"


def worker_group(workers: Workers, job: "Job") -> Any:
    """Start workers that measure configurations."""
    from esmeray.tuning.workers import WorkerGroup  # here: it loads torch, which the driver does not need

    return WorkerGroup(workers, job)


@dataclass(frozen=True)
class Job:
    """An experiment and the search over it. ``store_path`` is set once its data is prepared.

    ``make_group``: function that creates an object with the methods of :class:`~esmeray.tuning.workers.WorkerGroup`.
    """

    config: Config
    search: TuneConfig
    make_group: Callable[[Workers, "Job"], Any] = worker_group
    store_path: str = ""

    @property
    def folder(self) -> SearchFolder:
        return SearchFolder(self.config.run.storage_path, self.search.name)

    @property
    def measured(self) -> Config:
        """The experiment that trials use, under the search's name: their files, e.g. a tokenizer, go to its folder."""
        return self.config.model_copy(update={"run": self.config.run.model_copy(update={"name": self.search.name})})

    def own_settings(self, workers: Workers) -> Settings:
        """Return the experiment's own settings on these workers, whose number may be left to the cluster."""
        values = {name: attrgetter(key)(self.config) for name, key in KEYS.items()}
        return Settings(**values | {"workers": workers.count})

    def trial_config(self, settings: Settings) -> Config:
        """Return the experiment of a trial. Raises ConfigError if the settings can't be combined.

        With ``keep_global_tokens`` the result of training is unchanged. Otherwise a step is one batch per worker.
        """
        plain = self.measured.model_dump(mode="json")
        if not self.search.keep_global_tokens:
            plain["batch"]["global_tokens"] = settings.tokens * settings.workers
        for name, path in KEYS.items():
            *sections, key = path.split(".")
            reduce(getitem, sections, plain)[key] = getattr(settings, name)
        try:
            # Validated, unlike model_copy: sections check one another, and some settings exclude others.
            return Config.model_validate(plain)
        except ValidationError as error:
            problems = [problem["msg"].removeprefix("Value error, ") for problem in error.errors()]
            raise ConfigError("; ".join(problems)) from error


def value_text(value: Value) -> str:
    if value is None:
        return "any"
    return f"{value:,}" if isinstance(value, int) else value


def settings_text(settings: Settings, names: Iterable[str]) -> str:
    """Return settings as one line of text: ``token budget 8,192, precision bf16``."""
    return ", ".join(f"{NAMES[name]} {value_text(getattr(settings, name))}" for name in names)
