"""A folder or file that appears complete or not at all: build it under a temporary name beside the target, then rename.

Whoever builds a folder holds a lock on the target and writes into it which process builds: what a killed one left under
its temporary names is swept by the next, and nothing else, whatever its name. What a tool writes is listed in a
manifest, ``esmeray.json`` in a folder and ``.NAME.esmeray.json`` beside a file: which tool made it, and the XXH3-128 of
each file. Only the same tool replaces it, and only when asked. OSErrors become ResourceErrors with the place and the
remedy.
"""

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import xxhash

from esmeray.common.errors import ConfigError, DataError, DiskFullError, ResourceError
from esmeray.common.text import shortened

log = logging.getLogger(__name__)

MADE_FILE = "esmeray.json"
PARTS = "part-*"
"""Folders by which a folder grows, each with its own manifest: nothing of what was there before is written again."""
RECORD_FILE = "made_by.txt"
"""Has the command, in the folder of an unfinished output."""
_LONGEST_NAME, _LONGEST_PATH = 255, 2000
"""Bytes of a name, and characters of a path below a folder, that file systems take."""
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def refuse_existing(
    target: Path,
    made_by: str,
    overwrite: bool,
    not_made: Callable[[Path, str], str | None] | None = None,
    remedy: str = "choose another name",
) -> None:
    """Refuse a target that can't be written or that exists, unless it may be replaced. An empty folder may be taken.

    With ``overwrite``, what the same tool made and nobody changed since may be replaced; ``not_made`` finds what is not
    so, or None (default: by the manifest). Raises ConfigError for what exists, ResourceError for a place that is
    read-only.
    """
    # First: exists() follows a link, and what it leads to is somebody's.
    if target.is_symlink():
        raise ConfigError(f"{target}: is a symbolic link, which is never replaced; choose another name")
    if not target.exists():
        parent = _existing_parent(target)
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            reason = "read-only" if parent.is_dir() else "no folder"
            raise ResourceError(f"{target}: can't be written: {parent} is {reason}; choose another place")
    elif not (target.is_dir() and not any(target.iterdir())):
        if not overwrite:
            raise ConfigError(f"{target}: exists already; choose another name or pass --overwrite")
        if problem := (not_made or _not_made)(target, made_by):
            raise ConfigError(f"{target}: exists and {problem}, so it is not overwritten; {remedy}")


@contextmanager
def made_folder(target: Path, made_by: str, overwrite: bool) -> Iterator[Path]:
    """A temporary folder, renamed to ``target`` with its manifest when the block ends; see :func:`refuse_existing`."""
    refuse_existing(target, made_by, overwrite)
    with exclusive(target), published(target) as building:
        yield building
        list_files(building, made_by)
        refuse_existing(target, made_by, overwrite)  # something else may stand there by now


def list_files(folder: Path, made_by: str) -> None:
    """Write the manifest of a folder, with the checksums of all that is in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MADE_FILE)
    _write_manifest(_manifest_of(folder), made_by, {str(path.relative_to(folder)): file_xxh128(path) for path in paths})


@contextmanager
def grown_folder(target: Path, base: Path, made_by: str) -> Iterator[Path]:
    """As :func:`made_folder`, from links to all files of ``base``, which the same tool made: their checksums stay.

    What is to change is replaced in the block, never written to. Raises ConfigError where ``base`` holds anything else.
    """
    problem = _not_made(base, made_by, read=False)
    if problem:
        raise ConfigError(f"{base}: {problem}; move it away")
    files = _listed(_manifest_of(base), made_by)
    # A folder that grows may be as large as the disk: what is there is neither read nor copied.
    with exclusive(target), published(target) as building:
        for name in files:
            link(base / name, building / name)
        begun = {name: (building / name).stat().st_ino for name in files}
        yield building
        for path in [path for path in building.rglob("*") if path.is_file()]:
            name = str(path.relative_to(building))
            if begun.get(name) != path.stat().st_ino:
                files[name] = file_xxh128(path)
        _write_manifest(_manifest_of(building), made_by, files)


def link(source: Path, target: Path) -> None:
    """Give a file another name, whose folder is made; a copy where the file system has no hard links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def made_file(target: Path, made_by: str, overwrite: bool) -> Iterator[Path]:
    """A temporary name beside ``target``, renamed to it when the block ends, its manifest beside it."""
    refuse_file(target, made_by, overwrite)
    with writing(target), atomic_file(target) as temporary:
        yield temporary
        refuse_file(target, made_by, overwrite)
        _write_manifest(_manifest_of(target), made_by, {target.name: file_xxh128(temporary)})


def refuse_file(target: Path, made_by: str, overwrite: bool) -> None:
    """:func:`refuse_existing` for a single file, whose folder has to be there."""
    if target.is_dir():
        raise ConfigError(f"{target}: is a folder; name a file in it")
    if not target.absolute().parent.exists():
        raise ConfigError(f"{target}: there is no folder {target.parent}; make it first")
    refuse_existing(target, made_by, overwrite)


def _existing_parent(target: Path) -> Path:
    return next(folder for folder in target.absolute().parents if folder.exists())


def _not_made(target: Path, made_by: str, read: bool = True) -> str | None:
    """The part of the target that the tool did not make, by its manifest; unless ``read`` by the names alone."""
    manifest = _manifest_of(target)
    files = _listed(manifest, made_by)
    if not files:
        return f"was not made by {made_by}"
    folder = target if target.is_dir() else target.parent
    # Parts alone: another output that lies in this folder is not replaced with it.
    of_parts = {path: _listed(path, made_by) for path in target.rglob(f"{PARTS}/{MADE_FILE}")}
    for path, listed in of_parts.items():
        files |= {str((path.parent / name).relative_to(folder)): checksum for name, checksum in listed.items()}
    manifests = {manifest, *(path for path, listed in of_parts.items() if listed)}
    paths = [path for path in target.rglob("*") if path not in manifests] if target.is_dir() else [target]
    for path in paths:
        name = str(path.relative_to(folder))
        if path.is_symlink() or not (path.is_dir() or name in files):
            return f"holds {name}, which {made_by} did not make"
        if read and path.is_file() and file_xxh128(path) != files[name]:
            return f"{name} was changed since {made_by} made it"
    return None


def _listed(manifest: Path, made_by: str) -> dict[str, str]:
    """XXH3-128 by name, of a manifest of the tool; nothing of any other."""
    try:
        made = json.loads(manifest.read_text(encoding="utf-8"))
        files = dict(made["files"]) if made["made_by"] == made_by else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        files = {}  # a damaged manifest says nothing: what it is of is not replaced
    check_names(files, manifest)
    return files


def _manifest_of(target: Path) -> Path:
    return target / MADE_FILE if target.is_dir() else target.with_name(f".{target.name}.{MADE_FILE}")


def _write_manifest(path: Path, made_by: str, files: dict[str, str]) -> None:
    path.write_text(json.dumps({"made_by": made_by, "files": files}, indent=1) + "\n", encoding="utf-8")


def check_names(names: Iterable[object], manifest: Path | str) -> None:
    """Raise DataError where a manifest lists what can't be a file of its folder; see :func:`inner_name`."""
    try:
        list(map(inner_name, names))
    except ValueError as error:
        raise DataError(f"{manifest}: {error}; it was not written by Esmeray") from error


def inner_name(name: object) -> str:
    """Return the name of a file in a manifest's folder; ValueError where it is absolute, empty, climbs or is too long.

    Manifests come from others, too, and what they list is read, replaced and removed.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) and "\0" not in name else ()
    is_long = any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts) or len(str(name)) > _LONGEST_PATH
    if not parts or parts[0].startswith("/") or ".." in parts or is_long:
        raise ValueError(f"{shortened(repr(name), _LONGEST_NAME)} is no name of a file in its folder")
    return str(name)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` to write to; synced and renamed to it when the block ends, removed if it raises.

    A reader sees the old file or the new one, never a part.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        sync(temporary)  # a rename may reach the disk before the bytes do: after a power cut the file would be empty
        temporary.replace(path)
    finally:
        with suppress(OSError):  # a read-only file system refuses also where there is nothing
            temporary.unlink()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a whole file or nothing; text as UTF-8."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Hold the lock on a target, waiting for another process that builds it; sweep what a killed one left."""
    lock_path = target.with_name(f".{target.name}.lock")
    with writing(target):
        holder = ""
        # Most often it is not there, and its holder may end at any time.
        with suppress(FileNotFoundError):
            holder = lock_path.read_text(errors="replace")
        if holder and not holder.isdigit():
            raise ConfigError(f"{lock_path}: is no lock of Esmeray's; move it away, or choose another name")
        try:
            descriptor = take_lock(lock_path, 0)
        except BlockingIOError:
            # Said before it waits: a conversion may take an hour.
            log.warning("waiting for another process that is preparing %s", target)
            descriptor = take_lock(lock_path)
    try:
        _sweep(target, lock_path.read_text(errors="replace"))
        yield
    finally:
        lock_path.unlink(missing_ok=True)  # while it is held: whoever waits sees the file gone and makes a new one
        os.close(descriptor)


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """A temporary folder to build in; renamed to ``target``, which it replaces, when the block ends.

    Removed when the block raises. The caller holds :func:`exclusive`.
    """
    building, replaced = _temporary_names(target, str(os.getpid()))
    with writing(target):
        # First: what lies under these names is this process's own only as long as the lock says so.
        target.with_name(f".{target.name}.lock").write_text(str(os.getpid()))
        building.mkdir()
    try:
        with writing(target):
            yield building
            for path in building.rglob("*"):
                if path.is_file():  # safetensors writes 0600; the folder's mode is what the umask makes of it
                    path.chmod(building.stat().st_mode & 0o666)
                sync(path)
            sync(building)  # the names in it, too
            if target.exists():  # no rename replaces a folder that is not empty: for a moment there is none
                target.rename(replaced)
            building.rename(target)
            sync(target.parent)
            shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """The system's refusals to write, as ResourceErrors."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(target, str(error)) from error
        raise ResourceError(f"{target}: can't be written: {error.strerror or error}") from error


def is_disk_full(error: BaseException) -> bool:
    """Test for an error of a disk, or of a user's share of it, that has no room left."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def disk_full(target: Path, reason: str) -> DiskFullError:
    existing = _existing_parent(target)
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


def take_lock(path: Path, patience_s: float = math.inf, shared: bool = False) -> int:
    """Lock a file, which is made with its folder, and return its descriptor; closing it releases the lock.

    ``shared``: beside others that share it. The last holder may remove the file while it holds it. Raises
    BlockingIOError where another process holds it longer.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # its folder was removed since
            continue
        try:
            # LOCK_NB and a sleep: a wait within flock has no time-out.
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            # The last holder may have removed the file: a lock on it would keep nobody from a new one.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                os.close(descriptor)
                raise
            time.sleep(0.05)
        os.close(descriptor)


def _temporary_names(target: Path, process: str) -> tuple[Path, Path]:
    """Where a process builds a target, and where it sets aside the one before it."""
    building = target.with_name(f".{target.name}.building-{process}")
    return building, target.with_name(f".{target.name}.replaced-{process}")


def _sweep(target: Path, killed: str) -> None:
    """Remove what a process left that was killed, by the id that the lock has of it; nothing where it has none."""
    if not killed.isdigit():
        return
    building, replaced = _temporary_names(target, killed)
    if replaced.exists() and not target.exists():
        replaced.rename(target)  # killed between the two renames: the old folder is still the complete one
    for leftover in (building, replaced):
        shutil.rmtree(leftover, ignore_errors=True)


def file_xxh128(path: Path) -> str:
    """XXH3-128 of a file's bytes, hex: notices damage as surely as SHA-256 at ten times its speed; no signature."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
