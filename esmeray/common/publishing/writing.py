"""Files that are written whole or not at all, and the system's refusals to write, in one line."""

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from esmeray.common.errors import DiskFullError, ResourceError

PARTIAL = ".partial"
"""Suffix of the folder of unfinished work, which lies next to its output."""
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def resolved(target: Path) -> Path:
    """Return the absolute path of an output, with the symbolic links of its path and its own followed."""
    return Path(os.path.realpath(target))


def existing_parent(target: Path) -> Path:
    return next(folder for folder in target.absolute().parents if folder.exists())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to errors of the system that have none, such as those of ``write`` and ``close``."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary name next to ``path``; synced and renamed to it when the block ends, removed if the block raises.

    A reader sees the old file or the new one, never a part.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with naming(path):
            yield temporary
            sync(
                temporary
            )  # a rename may reach the disk before the bytes do: after a power cut the file would be empty
            temporary.replace(path)
    finally:
        with suppress(OSError):  # a read-only file system refuses also where there is nothing
            temporary.unlink()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a whole file or nothing; text as UTF-8."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def link(source: Path, target: Path) -> None:
    """Give a file another name, whose folder is made; a copy where the file system has no hard links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # never written to: it may be another name of a file that is published
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """The system's refusals to write, as ResourceErrors. An error that names another file is left as it is."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(target, str(error)) from error
        if isinstance(error, (ConnectionError, TimeoutError)) or not _concerns(error, target):
            raise
        raise ResourceError(f"{target}: can't be written: {error.strerror or error}") from error


def _concerns(error: OSError, target: Path) -> bool:
    """Test for an error at a target, its content or its temporary names, or for one without a file name."""
    if not isinstance(error.filename, (str, bytes)):
        return True
    target = target.absolute()
    path = Path(os.fsdecode(error.filename)).absolute()
    names = f".{target.name}.", f"{target.name}{PARTIAL}"
    return (
        any(parent == target or parent.name.startswith(names) for parent in [path, *path.parents])
        or path in target.parents
    )


def is_disk_full(error: BaseException) -> bool:
    """Test for an error of a disk, or of a user's share of it, that has no room left."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def disk_full(target: Path, reason: str) -> DiskFullError:
    existing = existing_parent(target)
    free_gb = shutil.disk_usage(existing).free / 1e9
    return DiskFullError(
        f"{target}: no room left to write it ({reason}; {free_gb:.1f} GB free in {existing}); "
        "free some space or choose another place"
    )


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
