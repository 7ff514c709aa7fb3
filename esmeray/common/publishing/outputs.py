"""Atomic output of folders and files: they are built in a scratch folder next to the target, then renamed.

Readers always see the old output or the new one: an existing folder and the new one exchange their names in one system
call. The builder holds a lock on the target. It first removes scratch folders of killed commands (:func:`sweep`), which
are recognised by their names.

Each output has a manifest, ``esmeray.json`` in a folder or ``.NAME.esmeray.json`` next to a file, with the tool and the
XXH3-128 of each file. Only the same tool replaces an output, and only on request. Symbolic links of an output path are
followed and stay. OSErrors of writing become ResourceErrors with the path and the remedy.
"""

import ctypes
import json
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from esmeray.common.errors import ConfigError, ResourceError
from esmeray.common.publishing.locks import lock_path_of, take_lock
from esmeray.common.publishing.manifest import (
    MADE_FILE,
    file_xxh128,
    list_files,
    listed,
    manifest_of,
    not_made_by,
    write_manifest,
)
from esmeray.common.publishing.writing import PARTIAL, existing_parent, link, resolved, sync, writing

log = logging.getLogger(__name__)

RECORD_FILE = "made_by.txt"
"""Name of the file that records which command created an unfinished or scratch folder."""
FINISHED_FILE = "finished.txt"
"""Name, in a folder of unfinished work, of a copy of the manifest of the output published from it."""
NOTES = "notes"
"""Key, in the ``attrs`` of a table that a Python call returns, of the lines about what was changed or left out."""
_REPLACED = "replaced"
"""Name, in a scratch folder, of the previous output while it is being replaced."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def refuse_existing(
    target: Path,
    made_by: str,
    overwrite: bool,
    not_made: Callable[[Path, str], str | None] | None = None,
    remedy: str = "choose another name",
) -> None:
    """Refuse a target that can't be written, or that exists and may not be replaced. An empty folder may be used.

    With ``overwrite``, an unchanged output of the same tool may be replaced. ``not_made`` returns the reason why a
    target is no such output, or None (default: by the manifest). Raises ConfigError if the target exists, ResourceError
    if its folder is missing or read-only.
    """
    target = resolved(target)
    recover(target)  # first: a killed command may have left the only complete output in a scratch folder
    if not target.exists():
        parent = existing_parent(target)
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            reason = "read-only" if parent.is_dir() else "not a folder"
            raise ResourceError(f"{target}: can't be written: {parent} is {reason}; choose another path")
    elif os.path.ismount(target):
        raise ConfigError(f"{target}: is a mount point, which can't be renamed; choose a folder inside it")
    elif not (target.is_dir() and not any(target.iterdir())):
        if not overwrite:
            raise ConfigError(f"{target}: already exists; choose another name or pass --overwrite")
        if problem := (not_made or not_made_by)(target, made_by):
            raise ConfigError(f"{target}: exists and {problem}, so it is not overwritten; {remedy}")


@contextmanager
def made_folder(target: Path, made_by: str, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder, which becomes ``target`` with its manifest at the end; see :func:`refuse_existing`."""
    refuse_existing(target, made_by, overwrite)
    with exclusive(target), published(target) as building:
        yield building
        list_files(building, made_by)
        refuse_existing(target, made_by, overwrite)  # another process may have created it since


@contextmanager
def grown_folder(target: Path, base: Path, made_by: str) -> Iterator[Path]:
    """Yield a folder like :func:`made_folder` that starts with hard links to all files of ``base``, of the same tool.

    The block replaces files that change and never writes into them; unchanged files keep their checksums. Raises
    ConfigError if ``base`` holds files that the tool did not make.
    """
    if problem := not_made_by(base, made_by, read=False):
        raise ConfigError(f"{base}: {problem}; move it away")
    files = listed(manifest_of(base), made_by)
    # A growing folder may be as large as the disk, so existing files are neither read nor copied.
    with exclusive(target), published(target) as building:
        for name in files:
            link(base / name, building / name)
        begun = {name: (building / name).stat().st_ino for name in files}
        yield building
        for path in [path for path in building.rglob("*") if path.is_file()]:
            name = str(path.relative_to(building))
            if begun.get(name) != path.stat().st_ino:
                files[name] = file_xxh128(path)
        write_manifest(building / MADE_FILE, made_by, files)


@contextmanager
def made_file(target: Path, made_by: str, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to ``target`` and gets a manifest when the block ends."""
    refuse_file(target, made_by, overwrite)
    with exclusive(target), published(target, is_folder=False) as temporary:
        yield temporary
        refuse_file(target, made_by, overwrite)
        manifest = temporary.with_name(MADE_FILE)  # the manifest is renamed after the file; see _clear
        write_manifest(manifest, made_by, {temporary.name: file_xxh128(temporary)})
        sync(manifest)


def refuse_file(target: Path, made_by: str, overwrite: bool) -> None:
    """:func:`refuse_existing` for a single file, whose folder has to exist."""
    if target.is_dir():
        raise ConfigError(f"{target}: is a folder; give a file in it")
    if not resolved(target).parent.exists():
        raise ConfigError(f"{target}: the folder {target.parent} does not exist; create it first")
    refuse_existing(target, made_by, overwrite)


@contextmanager
def output_or_scratch(output: str | Path | None) -> Iterator[str | Path]:
    """Yield the output of a Python call, or without one a path in a temporary folder, which is removed at the end."""
    with TemporaryDirectory() as scratch:
        yield Path(scratch) / "output" if output is None else output


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Hold the lock on a target, after waiting for other builders, and sweep scratch folders of killed ones."""
    target = resolved(target)
    with writing(target):
        lock_path = lock_path_of(target)
        try:
            lock = take_lock(lock_path, 0)
        except BlockingIOError:
            # Logged before the wait, since a conversion may take an hour.
            log.warning("waiting for another process that is preparing %s", target)
            lock = take_lock(lock_path)
    try:
        sweep(target)
        yield
    finally:
        with suppress(OSError):
            lock_path.unlink()  # removed while locked: waiting processes notice it and create a new file
        lock.close()


@contextmanager
def published(target: Path, is_folder: bool = True) -> Iterator[Path]:
    """Yield a temporary folder, or a file's path, that replaces ``target`` and gets its mode when the block ends.

    If the block raises, it is removed. The caller holds :func:`exclusive`.
    """
    target = resolved(target)
    scratch = scratch_path(target)
    building = scratch / target.name
    manifest = (building if is_folder else scratch) / MADE_FILE
    partial = target.with_name(target.name + PARTIAL)
    try:
        with writing(target):
            (building if is_folder else scratch).mkdir(parents=True)
            yield building
            mode = (target if target.exists() else scratch).stat().st_mode
            if is_folder:
                building.chmod(stat.S_IMODE(mode))
            for path in [*building.rglob("*"), building]:
                if path.is_file():  # safetensors writes 0600: readable as the folder is
                    path.chmod(mode & 0o666)
                sync(path)
            # This copy marks the unfinished work as done.
            if manifest.exists() and (partial / RECORD_FILE).is_file():
                shutil.copyfile(manifest, partial / FINISHED_FILE)
            _replace(target, building)
            sync(target.parent)
    finally:
        _clear(scratch, target)


def _replace(target: Path, building: Path) -> None:
    """Exchange the target and the new output.

    One system call, so that the target always exists. File systems that can't exchange two folders, e.g. NFS, take two
    renames; :func:`_clear` undoes the first if the second fails or the process is killed.
    """
    if not target.is_dir() or not any(target.iterdir()):
        building.replace(target)
        return
    try:
        _exchange(building, target)
    except (OSError, AttributeError):
        target.rename(building.parent / _REPLACED)
        building.rename(target)


def _exchange(first: Path, second: Path) -> None:
    """Exchange the names of two folders, by Linux's renameat2.

    Raises AttributeError if the C library lacks it (before glibc 2.28), OSError if the file system does.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(second))


def scratch_path(target: Path) -> Path:
    """Return a new name next to the target for a folder that :func:`sweep` removes."""
    return target.with_name(f".{target.name}.scratch-{uuid.uuid4().hex[:8]}")


def _scratch_folders(target: Path) -> list[Path]:
    name = re.compile(rf"\.{re.escape(target.name)}\.scratch-[0-9a-f]{{8}}")
    return [path for path in target.parent.glob(".*") if name.fullmatch(path.name) and not path.is_symlink()]


def sweep(target: Path) -> None:
    """Remove the scratch folders that killed commands left, and restore an output that one had set aside.

    The caller holds :func:`exclusive`, so that none of them belongs to a running process.
    """
    for scratch in _scratch_folders(target):
        _clear(scratch, target)


def _clear(scratch: Path, target: Path) -> None:
    """Remove a scratch folder, after moving a previous output or a new file's manifest from it to its final name."""
    replaced = scratch / _REPLACED
    manifest = scratch / MADE_FILE
    with suppress(OSError):  # on failure the next command tries again
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        if manifest.exists() and target.exists() and _lists(manifest, target):
            manifest.replace(manifest_of(target))
        shutil.rmtree(scratch)


def _lists(manifest: Path, target: Path) -> bool:
    """Return True if the manifest, which may be truncated, matches the file's current content."""
    with suppress(ValueError):
        return bool(json.loads(manifest.read_text(encoding="utf-8"))["files"] == {target.name: file_xxh128(target)})
    return False


def recover(target: Path) -> None:
    """Sweep the remains of killed commands, unless a running one holds the lock or the folder is read-only."""
    lock_path = lock_path_of(target)
    partial = target.with_name(target.name + PARTIAL)
    with suppress(OSError):
        if _scratch_folders(target) or lock_path.exists():
            with closing(take_lock(lock_path, 0)):
                sweep(target)
                lock_path.unlink()
        if (partial / FINISHED_FILE).read_bytes() == manifest_of(target).read_bytes():
            discard(partial, target)  # published already: nothing is left to resume


def discard(folder: Path, target: Path) -> None:
    """Remove a folder of unfinished work; it is renamed first, so that a half-removed one is never resumed."""
    scratch = scratch_path(target)
    with suppress(OSError):  # on failure the next command removes it
        folder.rename(scratch)
        shutil.rmtree(scratch)
