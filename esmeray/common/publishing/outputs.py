"""A folder or file that appears complete or not at all: built in a scratch folder next to the target, then renamed.

A reader sees the old output or the new one at every moment: an existing folder and the new one exchange their names in
one system call. Whoever builds holds a lock on the target, and first removes the scratch folders that killed commands
left (:func:`sweep`), which are recognised by their names.

What a tool writes is listed in a manifest, ``esmeray.json`` in a folder and ``.NAME.esmeray.json`` next to a file: the
tool that made it, and the XXH3-128 of each file. Only the same tool replaces it, and only when asked. An output path is
resolved first: what is behind a symbolic link is written there, and the link stays. OSErrors of writing become
ResourceErrors with the path and the remedy.
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
"""In unfinished work: the manifest of the output that was published from it."""
_REPLACED = "replaced"
"""In a scratch folder: the output before, while there is none of its name."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


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
    target = resolved(target)
    recover(target)  # first: a killed command may have left the only complete output in a scratch folder
    if not target.exists():
        parent = existing_parent(target)
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            reason = "read-only" if parent.is_dir() else "no folder"
            raise ResourceError(f"{target}: can't be written: {parent} is {reason}; choose another place")
    elif os.path.ismount(target):
        raise ConfigError(f"{target}: is a mount point, which can't be renamed; choose a folder in it")
    elif not (target.is_dir() and not any(target.iterdir())):
        if not overwrite:
            raise ConfigError(f"{target}: exists already; choose another name or pass --overwrite")
        if problem := (not_made or not_made_by)(target, made_by):
            raise ConfigError(f"{target}: exists and {problem}, so it is not overwritten; {remedy}")


@contextmanager
def made_folder(target: Path, made_by: str, overwrite: bool) -> Iterator[Path]:
    """A temporary folder, renamed to ``target`` with its manifest when the block ends; see :func:`refuse_existing`."""
    refuse_existing(target, made_by, overwrite)
    with exclusive(target), published(target) as building:
        yield building
        list_files(building, made_by)
        refuse_existing(target, made_by, overwrite)  # something else may stand there by now


@contextmanager
def grown_folder(target: Path, base: Path, made_by: str) -> Iterator[Path]:
    """As :func:`made_folder`, from links to all files of ``base``, which the same tool made: their checksums stay.

    What is to change is replaced in the block, never written to. Raises ConfigError where ``base`` holds anything else.
    """
    if problem := not_made_by(base, made_by, read=False):
        raise ConfigError(f"{base}: {problem}; move it away")
    files = listed(manifest_of(base), made_by)
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
        write_manifest(building / MADE_FILE, made_by, files)


@contextmanager
def made_file(target: Path, made_by: str, overwrite: bool) -> Iterator[Path]:
    """A temporary name next to ``target``, renamed to it when the block ends, with its manifest."""
    refuse_file(target, made_by, overwrite)
    with exclusive(target), published(target, is_folder=False) as temporary:
        yield temporary
        refuse_file(target, made_by, overwrite)
        manifest = temporary.with_name(MADE_FILE)  # once the file has its name, the manifest gets its own; see _clear
        write_manifest(manifest, made_by, {temporary.name: file_xxh128(temporary)})
        sync(manifest)


def refuse_file(target: Path, made_by: str, overwrite: bool) -> None:
    """:func:`refuse_existing` for a single file, whose folder has to be there."""
    if target.is_dir():
        raise ConfigError(f"{target}: is a folder; name a file in it")
    if not resolved(target).parent.exists():
        raise ConfigError(f"{target}: there is no folder {target.parent}; make it first")
    refuse_existing(target, made_by, overwrite)


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Hold the lock on a target, waiting for another process that builds it; sweep what a killed one left."""
    target = resolved(target)
    with writing(target):
        lock_path = lock_path_of(target)
        try:
            lock = take_lock(lock_path, 0)
        except BlockingIOError:
            # Said before it waits: a conversion may take an hour.
            log.warning("waiting for another process that is preparing %s", target)
            lock = take_lock(lock_path)
    try:
        sweep(target)
        yield
    finally:
        with suppress(OSError):
            lock_path.unlink()  # while it is held: whoever waits sees the file gone and makes a new one
        lock.close()


@contextmanager
def published(target: Path, is_folder: bool = True) -> Iterator[Path]:
    """A temporary folder, or the name of a file, to build in; when the block ends it replaces ``target``, whose mode
    it gets.

    Removed when the block raises. The caller holds :func:`exclusive`.
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
            # By it the unfinished work that an output is published from is known to be done.
            if manifest.exists() and (partial / RECORD_FILE).is_file():
                shutil.copyfile(manifest, partial / FINISHED_FILE)
            _replace(target, building)
            sync(target.parent)
    finally:
        _clear(scratch, target)


def _replace(target: Path, building: Path) -> None:
    """Put what was built in the place of the target, which is then in the place of what was built.

    One system call, so that no reader finds nothing. File systems that cannot exchange two folders, such as NFS, take
    two renames; :func:`_clear` undoes the first if the second fails or never comes.
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
    """Remove the scratch folders that killed commands left, and put back an output that one had set aside.

    The caller holds :func:`exclusive`, so that none of them belongs to a running process.
    """
    for scratch in _scratch_folders(target):
        _clear(scratch, target)


def _clear(scratch: Path, target: Path) -> None:
    """Remove a scratch folder, once an output that was set aside in it, or the manifest of a new file, has its name."""
    replaced = scratch / _REPLACED
    manifest = scratch / MADE_FILE
    with suppress(OSError):  # the folder stays, for the next command
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        if manifest.exists() and target.exists() and _lists(manifest, target):
            manifest.replace(manifest_of(target))
        shutil.rmtree(scratch)


def _lists(manifest: Path, target: Path) -> bool:
    """Test for the manifest, which may be cut short, of a file as it is."""
    with suppress(ValueError):
        return bool(json.loads(manifest.read_text(encoding="utf-8"))["files"] == {target.name: file_xxh128(target)})
    return False


def recover(target: Path) -> None:
    """Sweep what killed commands left of a target, unless a running one holds it or its folder is read-only."""
    lock_path = lock_path_of(target)
    partial = target.with_name(target.name + PARTIAL)
    with suppress(OSError):
        if _scratch_folders(target) or lock_path.exists():
            with closing(take_lock(lock_path, 0)):
                sweep(target)
                lock_path.unlink()
        if (partial / FINISHED_FILE).read_bytes() == manifest_of(target).read_bytes():
            discard(partial, target)  # killed since: nothing is left to resume


def discard(folder: Path, target: Path) -> None:
    """Remove a folder of unfinished work: first its name, so that no part of it is resumed."""
    scratch = scratch_path(target)
    with suppress(OSError):  # it stays, for the next command
        folder.rename(scratch)
        shutil.rmtree(scratch)
