"""A folder that appears complete or not at all: build it under a temporary name beside the target, then rename.

Whoever builds holds a lock on the target, so what lies under a temporary name while the lock is held was left by a
process that was killed, and is swept. Nothing here knows what the folder holds.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from train_config.errors import ResourceError

log = logging.getLogger(__name__)

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Hold the lock on a target, waiting for another process that builds it; sweep what a killed one left.

    Raises:
        ResourceError: the folder beside the target can't be written.
    """
    lock_path = target.with_name(f".{target.name}.lock")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(lock_path, target)
    try:
        _sweep(target)
        yield
    finally:
        lock_path.unlink(missing_ok=True)  # while it is held: whoever waits sees the file gone and makes a new one
        os.close(descriptor)


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """A temporary folder to build in; renamed to ``target`` when the block ends, removed when it raises.

    The caller holds :func:`exclusive`. A target that exists is replaced.

    Raises:
        ResourceError: the disk is full or can't be written.
    """
    building = target.with_name(f".{target.name}.building-{os.getpid()}")
    try:
        with writing(target):
            building.mkdir()
            yield building
            for path in building.rglob("*"):
                sync(path)
            sync(building)
            _rename(building, target)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """The system's refusals to write, worded for the person at the terminal.

    Raises:
        ResourceError: the disk is full or can't be written.
    """
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(target, str(error)) from error
        raise ResourceError(f"{target}: can't be written: {error.strerror or error}") from error


def is_disk_full(error: BaseException) -> bool:
    """Whether the disk, or the share of it that this user may fill, has no room left."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def disk_full(target: Path, reason: str) -> ResourceError:
    """The refusal for a disk with no room left."""
    existing = next(folder for folder in target.absolute().parents if folder.exists())
    free_gb = shutil.disk_usage(existing).free / 1e9
    return ResourceError(
        f"{target}: no room left to write it ({reason}; {free_gb:.1f} GB free in {existing}); "
        "free some space or choose another place; nothing was left behind"
    )


def sync(path: Path) -> None:
    """fsync of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(building: Path, target: Path) -> None:
    replaced = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    if target.exists():
        target.rename(replaced)
    building.rename(target)
    sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _locked(lock_path: Path, target: Path) -> int:
    while True:
        descriptor = os.open(lock_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("waiting for another process that is preparing %s", target)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_same_file(descriptor, lock_path):
            return descriptor
        os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Whether the path still names the open file; the last holder removes it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _sweep(target: Path) -> None:
    building, replaced = (f".{target.name}.{kind}-" for kind in ("building", "replaced"))
    for leftover in list(target.parent.iterdir()):
        if leftover.name.startswith(replaced) and not target.exists():
            leftover.rename(target)  # killed between the two renames: the old folder is still the complete one
        elif leftover.name.startswith((building, replaced)):
            shutil.rmtree(leftover, ignore_errors=True)
