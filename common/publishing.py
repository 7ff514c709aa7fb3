"""A folder or file that appears complete or not at all: built in a scratch folder beside the target, then renamed.

A reader sees the old output or the new one at every moment: an existing folder and the new one exchange their names in
one system call. Whoever builds holds a lock on the target, and first removes the scratch folders that killed commands
left (:func:`sweep`); a scratch folder is recognised by the record in it, which is removed last.

What a tool writes is listed in a manifest, ``esmeray.json`` in a folder and ``.NAME.esmeray.json`` beside a file: which
tool made it, and the XXH3-128 of each file. Only the same tool replaces it, and only when asked. An output path is
resolved first: what is behind a symbolic link is written there, and the link stays. OSErrors of writing become
ResourceErrors with the path and the remedy.
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path, PurePosixPath

import xxhash

from esmeray.common.errors import ConfigError, DataError, DiskFullError, ResourceError
from esmeray.common.text import shortened

log = logging.getLogger(__name__)

MADE_FILE = "esmeray.json"
PARTS = "part-*"
"""Folders by which a folder grows, each with its own manifest: nothing of what was there before is written again."""
RECORD_FILE = "made_by.txt"
"""Name of the file that records which command created an unfinished or scratch folder."""
PARTIAL = ".partial"
"""Suffix of the folder of unfinished work beside its output."""
FINISHED_FILE = "finished.txt"
"""In unfinished work: the manifest of the output that was published from it."""
_REPLACED = "replaced"
"""In a scratch folder: the output before, while there is none of its name."""
_LONGEST_NAME, _LONGEST_PATH = 255, 2000
"""Bytes of a name, and characters of a path below a folder, that file systems take."""
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
"""Answers of a file system without flock, such as Lustre mounted without ``-o flock``."""
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
        parent = _existing_parent(target)
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            reason = "read-only" if parent.is_dir() else "no folder"
            raise ResourceError(f"{target}: can't be written: {parent} is {reason}; choose another place")
    elif os.path.ismount(target):
        raise ConfigError(f"{target}: is a mount point, which can't be renamed; choose a folder in it")
    elif not (target.is_dir() and not any(target.iterdir())):
        if not overwrite:
            raise ConfigError(f"{target}: exists already; choose another name or pass --overwrite")
        if problem := (not_made or _not_made)(target, made_by):
            raise ConfigError(f"{target}: exists and {problem}, so it is not overwritten; {remedy}")


@contextmanager
def made_folder(target: Path, made_by: str, overwrite: bool) -> Iterator[Path]:
    """A temporary folder, renamed to ``target`` with its manifest when the block ends; see :func:`refuse_existing`."""
    target = resolved(target)
    refuse_existing(target, made_by, overwrite)
    with exclusive(target), published(target) as building:
        yield building
        list_files(building, made_by)
        refuse_existing(target, made_by, overwrite)  # something else may stand there by now
        _note_finished(target, building / MADE_FILE)


def list_files(folder: Path, made_by: str) -> None:
    """Write the manifest of a folder, with the checksums of all that is in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MADE_FILE)
    _write_manifest(_manifest_of(folder), made_by, {str(path.relative_to(folder)): file_xxh128(path) for path in paths})


@contextmanager
def grown_folder(target: Path, base: Path, made_by: str) -> Iterator[Path]:
    """As :func:`made_folder`, from links to all files of ``base``, which the same tool made: their checksums stay.

    What is to change is replaced in the block, never written to. Raises ConfigError where ``base`` holds anything else.
    """
    target = resolved(target)
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
        _write_manifest(building / MADE_FILE, made_by, files)
        _note_finished(target, building / MADE_FILE)


def link(source: Path, target: Path) -> None:
    """Give a file another name, whose folder is made; a copy where the file system has no hard links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # never written to: it may be another name of a file that is published
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def made_file(target: Path, made_by: str, overwrite: bool) -> Iterator[Path]:
    """A temporary name beside ``target``, renamed to it when the block ends, its manifest beside it."""
    target = resolved(target)
    refuse_file(target, made_by, overwrite)
    with exclusive(target), published(target, is_folder=False) as temporary:
        yield temporary
        refuse_file(target, made_by, overwrite)
        manifest = temporary.with_name(MADE_FILE)  # once the file has its name, the manifest gets its own; see _clear
        _write_manifest(manifest, made_by, {target.name: file_xxh128(temporary)})
        sync(manifest)
        _note_finished(target, manifest)


def refuse_file(target: Path, made_by: str, overwrite: bool) -> None:
    """:func:`refuse_existing` for a single file, whose folder has to be there."""
    target = resolved(target)
    if target.is_dir():
        raise ConfigError(f"{target}: is a folder; name a file in it")
    if not target.parent.exists():
        raise ConfigError(f"{target}: there is no folder {target.parent}; make it first")
    refuse_existing(target, made_by, overwrite)


def resolved(target: Path) -> Path:
    """Return the absolute path of an output, with the symbolic links of its path and its own followed."""
    return Path(os.path.realpath(target))


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


def listed_names(folder: Path, made_by: str) -> set[str]:
    """Return the names of the files that the manifest of a folder lists, and its own."""
    return {*_listed(folder / MADE_FILE, made_by), MADE_FILE}


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


def _note_finished(target: Path, manifest: Path) -> None:
    """Copy the manifest of an output into the unfinished work that it is published from, if there is any."""
    partial = target.with_name(target.name + PARTIAL)
    if (partial / RECORD_FILE).is_file():
        shutil.copyfile(manifest, partial / FINISHED_FILE)


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
    target = resolved(target)
    with writing(target):
        lock_path = _lock_path(target)
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
    try:
        with writing(target):
            scratch.mkdir()
            (scratch / RECORD_FILE).touch()
            if is_folder:
                building.mkdir()
        with writing(target):
            yield building
            mode = (target if target.exists() else scratch).stat().st_mode
            if is_folder:
                building.chmod(stat.S_IMODE(mode))
            for path in [*building.rglob("*"), building]:
                if path.is_file():  # safetensors writes 0600: readable as the folder is
                    path.chmod(mode & 0o666)
                sync(path)
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
    except OSError:
        target.rename(building.parent / _REPLACED)
        building.rename(target)


def _exchange(first: Path, second: Path) -> None:
    """Exchange the names of two folders, by renameat2 of Linux. Raises OSError if the file system has no such call."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc 2.28, musl 1.2.6
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(second))


def scratch_path(target: Path) -> Path:
    """Return a new name beside the target for a folder that :func:`sweep` removes once it holds a record."""
    return target.with_name(f".{target.name}.scratch-{uuid.uuid4().hex[:8]}")


def _scratch_folders(target: Path) -> list[Path]:
    """Scratch folders of a target: those of its name with a record, and empty ones."""
    start = f".{target.name}.scratch-"
    folders = [path for path in target.parent.glob(".*") if path.name.startswith(start) and not path.is_symlink()]
    return [path for path in folders if path.is_dir() and ((path / RECORD_FILE).exists() or not any(path.iterdir()))]


def sweep(target: Path) -> None:
    """Remove the scratch folders that killed commands left, and put back an output that one had set aside.

    The caller holds :func:`exclusive`, so that none of them belongs to a running process.
    """
    for scratch in _scratch_folders(target):
        _clear(scratch, target)


def _clear(scratch: Path, target: Path) -> None:
    """Remove a scratch folder, once an output that was set aside in it, or the manifest of a new file, has its name."""
    replaced, manifest = scratch / _REPLACED, scratch / MADE_FILE
    with suppress(OSError):  # the folder stays, for the next command
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        if manifest.exists() and _is_of_file(manifest.read_text(encoding="utf-8"), target):
            manifest.replace(_manifest_of(target))
        remove_folder(scratch, RECORD_FILE)


def _is_of_file(manifest: str, target: Path) -> bool:
    """Test for the manifest, which may be cut short, of a single file as it is."""
    with suppress(ValueError, KeyError):
        return target.is_file() and json.loads(manifest)["files"] == {target.name: file_xxh128(target)}
    return False


def recover(target: Path) -> None:
    """Sweep what killed commands left of a target, unless a running one holds it or its folder is read-only."""
    lock_path = _lock_path(target)
    partial = target.with_name(target.name + PARTIAL)
    with suppress(OSError):
        if _scratch_folders(target) or lock_path.exists():
            with closing(take_lock(lock_path, 0)):
                sweep(target)
                lock_path.unlink()
        if (partial / FINISHED_FILE).exists() and _is_published(target, (partial / FINISHED_FILE).read_text()):
            discard(partial, target)  # killed since: nothing is left to resume


def _is_published(target: Path, manifest: str) -> bool:
    """Test whether this manifest is that of the target as it is."""
    if _manifest_of(target).read_text(encoding="utf-8") != manifest:
        return False
    return target.is_dir() or _is_of_file(manifest, target)


def discard(folder: Path, target: Path) -> None:
    """Remove a folder of unfinished work, which has a record: first its name, so that no part of it is resumed."""
    scratch = scratch_path(target)
    with suppress(OSError):  # it stays, for the next command
        folder.rename(scratch)
        remove_folder(scratch, RECORD_FILE)


def remove_folder(folder: Path, last: str) -> None:
    """Remove a folder, the file ``last`` at the end: until then the folder is recognised. What stays is swept later."""
    for path in folder.glob("*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != last:
            with suppress(OSError):
                path.unlink()
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [last]:
            (folder / last).unlink()
        folder.rmdir()


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
    """Test for an error at a target, at what is in it, or at the temporary names beside it; or without a file name."""
    if not isinstance(error.filename, (str, bytes)):
        return True
    target = target.absolute()
    path = Path(os.fsdecode(error.filename)).absolute()
    names = f".{target.name}.", f"{target.name}{PARTIAL}"
    beside = [path, *path.parents]
    return any(parent == target or parent.name.startswith(names) for parent in beside) or path in target.parents


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


def _lock_path(target: Path) -> Path:
    """Path of the lock of a target. Raises ConfigError if something else has this name."""
    path = target.with_name(f".{target.name}.lock")
    # Most often it is not there, and its holder may end at any time. Earlier versions wrote a process into it.
    with suppress(OSError):
        if path.is_file() and not (path.read_text(errors="replace") or "0").isdigit():
            raise ConfigError(f"{path}: is no lock of Esmeray's; move it away, or choose another name")
    return path


class Lock:
    """A lock that is held until it is closed."""

    def __init__(self, descriptor: int, release: Callable[[], None] = lambda: None) -> None:
        self._descriptor = descriptor
        self._release = release

    def write(self, text: str) -> None:
        """Replace the text of the lock's file."""
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, text.encode())

    def close(self) -> None:
        self._release()
        os.close(self._descriptor)


def take_lock(path: Path, patience_s: float = math.inf, shared: bool = False) -> Lock:
    """Lock a file, which is made with its folder.

    ``shared``: beside others that share it. The last holder may remove the file while it holds it. Raises
    BlockingIOError where another process holds it longer, ConfigError if the file is a link or another user's.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = _open_lock(path)
        except FileNotFoundError:  # its folder was removed since
            continue
        try:
            # LOCK_NB and a sleep: a wait within flock has no time-out.
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            # The last holder may have removed the file: a lock on it would keep nobody from a new one.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return Lock(descriptor)
        except FileNotFoundError:
            pass
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                os.close(descriptor)
                raise
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            return _lock_without_flock(path, descriptor, patience_s, shared)
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    """Open or make the file of a lock. Another user could have made it a link to a file of this user's."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(FileExistsError):
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise ConfigError(f"{path}: is a link or no regular file, so it is no lock of Esmeray's; remove it")
    refuse_other_user(path, status)
    return os.open(path, flags)


def refuse_other_user(path: Path, status: os.stat_result) -> None:
    """Raise ConfigError if a file or folder to continue with belongs to another user."""
    if status.st_uid == os.geteuid():
        return
    # A file system may map users, as NFS does root: there what this process makes has the same owner.
    with tempfile.TemporaryFile(dir=path.parent) as probe:
        owner = os.fstat(probe.fileno()).st_uid
    if status.st_uid != owner:
        raise ConfigError(
            f"{path}: belongs to another user (uid {status.st_uid}), so it is not continued; remove it or choose "
            "another name"
        )


def _lock_without_flock(path: Path, descriptor: int, patience_s: float, shared: bool) -> Lock:
    """A lock by a file that names host and process, for a file system without flock; never shared."""
    from filelock import SoftFileLock, Timeout  # here: few file systems need it

    if shared:
        os.close(descriptor)
        raise ResourceError(
            f"{path.parent}: its file system has no locks (flock), which shared files need; choose a local folder"
        )
    log.warning(
        "%s: the file system has no locks (flock); a file that names host and process is used instead", path.parent
    )
    lock = SoftFileLock(
        path.with_name(f"{path.name}.held"), -1 if patience_s == math.inf else patience_s, thread_local=False
    )
    try:
        lock.acquire()
    except Timeout as error:
        os.close(descriptor)
        raise BlockingIOError(errno.EAGAIN, str(error)) from error
    return Lock(descriptor, lock.release)


def file_xxh128(path: Path) -> str:
    """XXH3-128 of a file's bytes, hex: notices damage as surely as SHA-256 at ten times its speed; no signature."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
