"""The settings that a search varies, and the result of measuring them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import attrgetter, getitem
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from esmeray.common.errors import ConfigError
from esmeray.training.config import Config
from esmeray.training.engine.deepspeed_settings import zero_stage

Value: TypeAlias = int | str | bool | None
Status: TypeAlias = Literal["ok", "out_of_memory", "crash", "timeout", "nan", "pruned", "refused"]

_SETTINGS = {
    "tokens": ("batch.tokens", "token budget"),
    "workers": ("ray.num_workers", "workers"),
    "precision": ("training.precision", "precision"),
    "num_workers": ("data.num_workers", "loader processes"),
    "compile": ("training.compile", "compile"),
    "batch_size": ("batch.batch_size", "sequences a batch"),
    "stage": ("deepspeed.stage", "ZeRO stage"),
    "prefetch": ("data.prefetch", "prefetched batches"),
    "gradient_checkpointing": ("model.backbone.gradient_checkpointing", "checkpointing"),
}
"""Key in an experiment's config and words of each setting, those first that usually decide most."""

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
"""Results of a trial, in words."""


@dataclass(frozen=True)
class Settings:
    """A configuration of a search; each field stands for one key of the config (:data:`KEYS`)."""

    tokens: int
    batch_size: int | None
    num_workers: int
    prefetch: int
    precision: str
    gradient_checkpointing: bool | str
    compile: bool
    stage: int
    workers: int

    @classmethod
    def of(cls, config: Config, workers: int, device: str = "cpu") -> "Settings":
        """The settings of a config on a kind of device. Raises ConfigError where DeepSpeed's can't be read."""
        values: dict[str, Any] = {name: attrgetter(path)(config) for name, path in KEYS.items()}
        stage = zero_stage(config.training, config.deepspeed)
        if values["compile"] is None:
            values["compile"] = device == "cuda" and stage < 3
        return cls(**values | {"stage": stage, "workers": workers})

    def applied(self, config: Config, keep_global_tokens: bool) -> Config:
        """The config with these settings; ConfigError where they don't go together.

        With ``keep_global_tokens`` the result of training stays; else a step is one batch of each worker.
        """
        plain = config.model_dump(mode="json")
        if not keep_global_tokens:
            plain["batch"]["global_tokens"] = self.tokens * self.workers
        for name, path in KEYS.items():
            *sections, key = path.split(".")
            reduce(getitem, sections, plain)[key] = getattr(self, name)
        try:
            return Config.model_validate(plain)
        except ValidationError as error:
            problems = [problem["msg"].removeprefix("Value error, ") for problem in error.errors()]
            raise ConfigError("; ".join(problems)) from error


@dataclass(frozen=True)
class Measurement:
    """The result of a trial, which took ``seconds``.

    Attributes:
        status: ``pruned``: it could not win any more; ``refused``: the settings can't be run.
        tokens_per_s: real tokens of all workers; the median of the last two windows, or of all if no two agree.
        peak_memory_bytes: the largest over the workers.
        total_memory_bytes: of one device; on the CPU what one worker may take.
        shares: of the time of a step by phase, mean over the workers.
        reusable: the workers can take the next trial. After a crash others may wait in a step for ever.
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
        """Tokens per second; 0 where it failed or was too large."""
        return (self.tokens_per_s or 0.0) if self.fits(memory_margin) else 0.0

    def fits(self, memory_margin: float) -> bool:
        """Test that it ran and left the margin free."""
        return self.status in ("ok", "pruned") and (self.memory_share or 0.0) <= 1 - memory_margin

    def is_too_large(self, memory_margin: float) -> bool:
        """Test for out of memory or too little of it left free."""
        return self.status == "out_of_memory" or (self.memory_share or 0.0) > 1 - memory_margin

    @property
    def memory_share(self) -> float | None:
        """Peak as a share of the device's memory."""
        if self.peak_memory_bytes is None or not self.total_memory_bytes:
            return None
        return self.peak_memory_bytes / self.total_memory_bytes


def value_text(name: str, value: Value) -> str:
    if value is None:
        return "any"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else value


def settings_text(settings: Settings, names: Iterable[str]) -> str:
    """In a line: ``token budget 8,192, precision bf16``."""
    return ", ".join(f"{NAMES[name]} {value_text(name, getattr(settings, name))}" for name in names)


def memory_text(size: float | None) -> str:
    if size is None:
        return "not known"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
