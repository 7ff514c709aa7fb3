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
from esmeray.training.engine.deepspeed_settings import zero_stage
from esmeray.tuning.section import TuneConfig

Value: TypeAlias = int | str | bool | None
Status: TypeAlias = Literal["ok", "out_of_memory", "crash", "timeout", "nan", "pruned", "refused"]

_SETTINGS = {
    "tokens": ("batch.tokens", "token budget"),
    "workers": ("ray.num_workers", "workers"),
    "precision": ("training.precision", "precision"),
    "num_workers": ("data.num_workers", "loader processes"),
    "compile": ("training.compile", "compile"),
    "batch_size": ("batch.batch_size", "sequences per batch"),
    "stage": ("deepspeed.stage", "ZeRO stage"),
    "prefetch": ("data.prefetch", "prefetched batches"),
    "gradient_checkpointing": ("model.backbone.gradient_checkpointing", "checkpointing"),
}
"""Key in an experiment's config and label of each setting, in the usual order of importance."""

KEYS = {name: key for name, (key, _) in _SETTINGS.items()}
NAMES = {name: words for name, (_, words) in _SETTINGS.items()}

STATUSES: dict[Status, str] = {
    "ok": "measured",
    "pruned": "stopped early",
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
    prefetch: int
    precision: str
    gradient_checkpointing: bool | str
    compile: bool
    stage: int
    workers: int


@dataclass(frozen=True)
class Measurement:
    """The result of a trial, which took ``seconds``.

    Attributes:
        status: ``pruned``: the trial could no longer win; ``refused``: the settings can't be run.
        tokens_per_s: real tokens of all workers; median of the last two windows, or of all if they don't agree.
        peak_memory_bytes: maximum over the workers.
        total_memory_bytes: memory of one device; on the CPU the limit of one worker.
        shares: share of a step's time by phase, mean over the workers.
        reusable: the workers can take the next trial. After a crash others may be stuck in a step forever.
    """

    status: Status
    reason: str
    tokens_per_s: float | None = None
    windows: list[float] = field(default_factory=list)
    peak_memory_bytes: int | None = None
    total_memory_bytes: int | None = None
    shares: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    reusable: bool = True

    def speed(self, memory_margin: float) -> float:
        """Return tokens per second; 0 if the trial failed or used too much memory."""
        return (self.tokens_per_s or 0.0) if self.fits(memory_margin) else 0.0

    def fits(self, memory_margin: float) -> bool:
        """Test whether it ran and left the margin free."""
        return self.status in ("ok", "pruned") and (self.memory_share or 0.0) <= 1 - memory_margin

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
        self.picture = self.path / "trials.png"
        self.ray_tune = self.path / "ray_tune"


@dataclass(frozen=True)
class Job:
    """An experiment and the search over it. ``store_path`` is set once its data is prepared.

    ``make_group``: function that creates, from :class:`~esmeray.cluster.placement.Workers` and a job, an object with
    the methods of :class:`~esmeray.tuning.workers.WorkerGroup`. None: that class itself.
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
        """The experiment that trials use, under the search's name: their files, e.g. a tokenizer, go to its folder."""
        return self.config.model_copy(update={"run": self.config.run.model_copy(update={"name": self.search.name})})

    def own_settings(self, workers: Workers) -> Settings:
        """Return the experiment's own settings. Raises ConfigError if DeepSpeed's settings can't be read."""
        values = {name: attrgetter(key)(self.config) for name, key in KEYS.items()}
        # Settings may be left to DeepSpeed's file, the cluster or the device: resolve them as training does.
        values["stage"] = zero_stage(self.config.training, self.config.deepspeed)
        values["workers"] = workers.count
        if values["compile"] is None:
            values["compile"] = workers.device == "cuda" and values["stage"] < 3
        return Settings(**values)

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


def value_text(name: str, value: Value) -> str:
    if value is None:
        return "any"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else value


def settings_text(settings: Settings, names: Iterable[str]) -> str:
    """Return settings as one line of text: ``token budget 8,192, precision bf16``."""
    return ", ".join(f"{NAMES[name]} {value_text(name, getattr(settings, name))}" for name in names)


def memory_text(size: float | None) -> str:
    if size is None:
        return "not known"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
