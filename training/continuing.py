"""Whether a run of this name may start, goes on, or is done: settled before anything is started."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from train_config.errors import CheckpointError, ConfigError, ResourceError
from train_config.loading import load_config
from train_config.schema import Config
from training.checkpoint import CheckpointFolder, CheckpointStore
from training.run_folder import RunFolder

FIXED = (
    "run.seed",
    "data.max_length",
    "data.crop",
    "data.labels",
    "data.validation_share",
    "batch",
    "model",
    "training.amp_dtype",
    "deepspeed.stage",
    "deepspeed.offload_optimizer",
)
"""Settings that a checkpoint can't be continued without. The data itself is known by the store's checksum."""

FREE = ("model.backbone.gradient_checkpointing", "model.classifier.patience", "model.classifier.bootstrap")

HARMLESS = (
    "ray",
    "wandb",
    "monitoring",
    "training.gpu_log_interval",
    "checkpoint",
    "run.resume",
    "run.storage_path",
    "data.num_workers",
    "data.prefetch",
    "data.store",
    "data.source",
)


@contextmanager
def locked(run: RunFolder) -> Iterator[None]:
    """Keep a second process from training the same run.

    Raises:
        ResourceError: another process does.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    with (run.path / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ResourceError(
                f"{run.path}: is being trained by process {file.read().strip()}: wait, or choose another run.name"
            ) from error
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def check_resume(run: RunFolder, config: Config) -> list[str]:
    """Check what ``run.resume`` allows and that a run that goes on is still the same.

    Returns:
        Remarks on settings that changed and may.

    Raises:
        ConfigError: the run exists and may not, or a setting changed that can't.
        CheckpointError: the run does not exist and must.
    """
    if not run.exists:
        if config.run.resume == "must":
            raise CheckpointError(
                f"{run.path}: no such run, and run.resume is 'must': check run.name and run.storage_path"
            )
        return []
    if config.run.resume == "never":
        raise ConfigError(
            f"{run.path}: the run exists, and run.resume is 'never': choose another run.name, or run.resume allow"
        )
    earlier = load_config(run.config)
    changed = differences(earlier.model_dump(), config.model_dump())
    fixed = {key: values for key, values in changed.items() if within(key, FIXED) and not within(key, FREE)}
    if fixed and CheckpointStore(run.checkpoints).complete():
        key, (old, new) = next(iter(fixed.items()))
        raise ConfigError(
            f"{key}: the run {run.path.name} was started with {old!r}, now {new!r}: "
            "set it back, or choose another run.name"
        )
    return [f"{key} was {old!r}, is now {new!r}" for key, (old, new) in changed.items() if not within(key, HARMLESS)]


def check_worker_count(run: RunFolder, count: int) -> None:
    """Refuse another number of workers than the newest checkpoint was written by, before any is started.

    Raises:
        CheckpointError: it differs; says what it was.
    """
    for folder in CheckpointStore(run.checkpoints).complete()[:1]:
        try:
            written_by = folder.manifest().world_size
        except CheckpointError:
            return  # damaged: the workers look for one that holds
        if written_by != count:
            raise other_worker_count(folder, written_by, count)


def other_worker_count(folder: CheckpointFolder, written_by: int, count: int) -> CheckpointError:
    """The refusal of another number of workers."""
    return CheckpointError(
        f"{folder.path}: written by {written_by} workers, this run has {count}; "
        f"ZeRO's shards belong to a number of workers: set ray.num_workers to {written_by}"
    )


def is_finished(run: RunFolder, config: Config) -> bool:
    """Whether the run reached its end and no more steps are asked for."""
    outcome = run.read_outcome()
    if not run.exists or outcome is None or outcome.status != "finished":
        return False
    earlier = load_config(run.config).training
    return (earlier.epochs, earlier.max_steps) == (config.training.epochs, config.training.max_steps)


def quarantine_ray_snapshot(run: RunFolder) -> str | None:
    """Move Ray's own record of the run aside: Ray Train dies of a damaged one, or of one from another version.

    Esmeray does not need it: checkpoints are known by their manifests. Returns a remark if it was damaged.
    """
    path = run.ray_snapshot
    if not path.exists():
        return None
    aside = path.with_name(f"{path.name}.set-aside")
    path.replace(aside)
    try:
        json.loads(aside.read_text())
    except ValueError:
        return f"Ray's {path.name} was damaged and is now {aside.name}; the run goes on from its own checkpoints"
    return None


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, each with the old and the new one."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in new.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            found |= differences(old.get(name, {}), value, f"{key}.")
        elif old.get(name) != value:
            found[key] = (old.get(name), value)
    return found


def within(key: str, names: tuple[str, ...]) -> bool:
    """Whether a key is one of these or belongs to one of these sections."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
