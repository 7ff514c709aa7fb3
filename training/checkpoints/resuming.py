"""Checks before anything of a run is written: refuse, resume, or finished already."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, ConfigError, ResourceError
from common.publishing import is_same_file, writing
from run_folder.paths import RunFolder
from train_config.loading import load_recorded
from train_config.natures import END, FIXED, FREE, UNSEEN, OnResume, on_resume
from train_config.schema import Config, DataSection
from training.checkpoints.checkpoint import CheckpointStore

LOCK_TIMEOUT_S = 0.5


@contextmanager
def locked(run: RunFolder) -> Iterator[None]:
    """Keep a second process from training the same run. A folder with nothing but the lock is removed at the end.

    Raises ResourceError where another process does, or the folder can't be written.
    """
    descriptor = _take_lock(run.lock)
    try:
        with writing(run.path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with suppress(OSError):
            if [*run.path.iterdir()] == [run.lock]:  # the command was refused before it began
                run.lock.unlink()  # while it is held: whoever waits sees the file gone
                run.path.rmdir()
        os.close(descriptor)


def _take_lock(lock: Path) -> int:
    """Take the lock and return its descriptor. A live view of the run holds it for a moment now and then."""
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        with writing(lock.parent):
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_same_file(descriptor, lock):
                return descriptor
        except BlockingIOError as error:
            if time.monotonic() > deadline_s:
                holder = os.pread(descriptor, 1024, 0).decode(errors="replace").strip()
                os.close(descriptor)
                raise ResourceError(
                    f"{lock.parent}: is being trained by process {holder}: wait, or choose another run.name"
                ) from error
            time.sleep(0.05)
        os.close(descriptor)


def check_resume(run: RunFolder, config: Config) -> list[str]:
    """Check what ``run.resume`` allows and that no fixed setting changed; returns remarks on others that did.

    Raises ConfigError where it did or the run must not exist, CheckpointError where the run must exist.
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
    changed = _changed(run, config)
    # Without a checkpoint the run begins anew, with whatever settings.
    if CheckpointStore(run.checkpoints).complete() and (change := _of_nature(changed, FIXED)):
        key, old, new = change
        raise ConfigError(
            f"{key}: the run {run.path.name} was started with {old!r}, now {new!r}: "
            "set it back, or choose another run.name"
        )
    return [
        f"{key} was {old!r}, is now {new!r}"
        for key, (old, new) in changed.items()
        if on_resume(Config, key) is not UNSEEN
    ]


def check_worker_count(run: RunFolder, count: int) -> None:
    """Raise CheckpointError for another number of workers than the newest checkpoint was written by."""
    folder = CheckpointStore(run.checkpoints).newest_intact()
    if folder is not None and (written_by := folder.manifest().world_size) != count:
        raise CheckpointError(
            f"{folder.path}: written by {written_by} workers, this run has {count}; "
            f"ZeRO's shards belong to a number of workers: set ray.num_workers to {written_by}"
        )


def check_data(run: RunFolder, data: DataSection, checksum: str) -> None:
    """Raise CheckpointError for data whose store has another checksum than that of the newest checkpoint."""
    folder = CheckpointStore(run.checkpoints).newest_intact()
    if folder is None or (earlier := folder.manifest()).store_checksum == checksum:
        return
    before, now = ", ".join(earlier.config["data"]["source"]), ", ".join(data.source)
    raise CheckpointError(
        f"data.source: the run {run.path.name} was trained on {before} (checksum {earlier.store_checksum[:12]}), not "
        f"on {now}{' as it is' if now == before else ''} (checksum {checksum[:12]}): "
        "restore that data, or choose another run.name"
    )


def as_begun(run: RunFolder, config: Config) -> Config:
    """The config with the warm-up that the run began with, where none is given."""
    if config.training.warmup_steps is not None or not (run.exists and CheckpointStore(run.checkpoints).complete()):
        return config
    warmup_steps = load_recorded(run.config).training.warmup_steps
    training = config.training.model_copy(update={"warmup_steps": warmup_steps})
    return config.model_copy(update={"training": training})


def is_finished(run: RunFolder, config: Config) -> bool:
    """Test for a run that reached its end where no more steps are asked for.

    Raises ConfigError where it did, and a setting that its result depends on changed.
    """
    outcome = run.read_outcome()
    if not run.exists or outcome is None or outcome.status != "finished":
        return False
    changed = _changed(run, config)
    if _of_nature(changed, END):
        return False
    if change := _of_nature(changed, FIXED) or _of_nature(changed, FREE):
        key, old, new = change
        raise ConfigError(
            f"{key}: the run {run.path.name} is finished, trained with {old!r}, now {new!r}: set it back, choose "
            "another run.name, or raise training.max_steps or training.epochs to train further with it"
        )
    return True


def check_steps(run: RunFolder, config: Config, total_steps: int) -> None:
    """Raise ConfigError for a changed end of training that leaves no step to take after the newest checkpoint."""
    folder = CheckpointStore(run.checkpoints).newest_intact()
    if folder is None or total_steps > folder.step:
        return
    if change := _of_nature(_changed(run, config), END):
        key, old, new = change
        raise ConfigError(
            f"{key}: was {old!r}, now {new!r}, so that training would end after {total_steps} steps, and the run "
            f"{run.path.name} has taken {folder.step} already: raise training.max_steps or training.epochs, or choose "
            "another run.name"
        )


def _changed(run: RunFolder, config: Config) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from those that the run recorded."""
    return differences(load_recorded(run.config).model_dump(), config.model_dump())


def _of_nature(changed: dict[str, tuple[Any, Any]], nature: OnResume) -> tuple[str, Any, Any] | None:
    """The first changed setting of this nature, with the old and the new value."""
    for key, (old, new) in changed.items():
        if on_resume(Config, key) is nature:
            return key, old, new
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
    """Test for a key that is one of these or belongs to one of these sections."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
