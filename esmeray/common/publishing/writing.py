"""Atomic writing of files, and one-line errors if the system refuses to write."""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from esmeray.common.errors import DiskFullError, EsmerayError, ResourceError

PARTIAL = ".partial"
"""Suffix of the folder of unfinished work, next to the output."""
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def resolved(target: Path) -> Path:
    """Return the absolute path of an output, with all symbolic links followed."""
    return Path(os.path.realpath(target))


def existing_parent(target: Path) -> Path:
    return next(folder for folder in target.absolute().parents if folder.exists())


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Add the file's name to OSErrors without one, e.g. from ``write`` and ``close``."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path``, which is synced and renamed to it when the block ends.

    Readers see the old file or the complete new one. If the block raises, the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with named_errors(path):
            yield temporary
            # A rename may reach the disk before the bytes do: after a power cut the file would be empty.
            sync(temporary)
            temporary.replace(path)
    finally:
        with suppress(OSError):  # a read-only file system raises even if the file is missing
            temporary.unlink()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically; text as UTF-8."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def link(source: Path, target: Path) -> None:
    """Hard-link a file, and create the target's folder; copy it if the file system has no hard links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # not overwritten in place: it may be a hard link to a published file
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn OSErrors of writing ``target`` into ResourceErrors. Errors that name other files pass unchanged."""
    try:
        yield
    except Exception as raised:
        error = _system_error(raised)
        if error is None:
            raise
        if is_disk_full(error):
            raise disk_full(target, str(error)) from raised
        if isinstance(error, (ConnectionError, TimeoutError)) or not _concerns(error, target):
            raise
        raise ResourceError(f"{target}: can't be written: {error.strerror or error}") from raised


def _system_error(error: Exception) -> OSError | None:
    """Return the OSError of an exception. Rust libraries (safetensors, tokenizers) raise their own with its number."""
    if isinstance(error, (OSError, EsmerayError)):
        return error if isinstance(error, OSError) else None
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def _concerns(error: OSError, target: Path) -> bool:
    """Return True if the error names the target, its content, parents or temporary files, or no file."""
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
    """Return True if the disk is full or the user's quota is exceeded."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def disk_full(target: Path, reason: str) -> DiskFullError:
    existing = existing_parent(target)
    free_gb = shutil.disk_usage(existing).free / 1e9
    return DiskFullError(
        f"{target}: no space left ({reason}; {free_gb:.1f} GB free in {existing}); free some space or choose "
        "another path"
    )


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
