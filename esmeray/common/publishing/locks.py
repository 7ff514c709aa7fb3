"""File locks between processes of one machine or one shared file system.

Locks use flock, which the system releases when the process ends. On a file system without flock, a file that names
host and process is used instead. Files and links of other users are never opened: a link could lead to a file of this
user.
"""

import errno
import fcntl
import logging
import math
import os
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from esmeray.common.errors import ConfigError, ResourceError

log = logging.getLogger(__name__)

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
"""Error numbers of a file system without flock, e.g. Lustre mounted without ``-o flock``."""


def lock_path_of(target: Path) -> Path:
    """Path of a target's lock file. Raises ConfigError if another kind of file has this name."""
    path = target.with_name(f".{target.name}.lock")
    # The file is usually missing, and its holder may remove it at any time. Earlier versions wrote a process id.
    with suppress(OSError):
        if path.is_file() and not (path.read_text(errors="replace") or "0").isdigit():
            raise ConfigError(f"{path}: is not an Esmeray lock file; move it away, or choose another name")
    return path


class Lock:
    """A lock, held until :meth:`close`."""

    def __init__(self, descriptor: int, release: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self.close = release

    def write(self, text: str) -> None:
        """Replace the text of the lock's file."""
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, text.encode())


def take_lock(path: Path, patience_s: float = math.inf, shared: bool = False) -> Lock:
    """Lock a file, and create it and its folder if needed.

    ``shared``: several processes may hold the lock at once. The last holder may remove the file while it holds it.
    Raises BlockingIOError if the lock is not free within ``patience_s`` seconds, ConfigError if the file is a link or
    belongs to another user.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), ExitStack() as stack:  # the last holder removed the file, or its folder
            descriptor = _open_lock(path)
            stack.callback(os.close, descriptor)
            try:
                # LOCK_NB and a sleep, since flock itself has no timeout.
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(0.05)
                continue
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                stack.callback(_lock_without_flock(path, patience_s, shared))
                return Lock(descriptor, stack.pop_all().close)
            # A lock on a file that was removed excludes no other process: the next one locks a new file.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return Lock(descriptor, stack.pop_all().close)


def _open_lock(path: Path) -> int:
    """Open or create a lock file. Links are refused: another user could point one at a file of this user."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(FileExistsError):
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise ConfigError(f"{path}: is not a regular file, so it is not an Esmeray lock file; remove it")
    refuse_other_user(path, status)
    return os.open(path, flags)


def refuse_other_user(path: Path, status: os.stat_result) -> None:
    """Raise ConfigError if an existing file or folder belongs to another user."""
    if status.st_uid == os.geteuid():
        return
    # A file system may map users, as NFS does for root: compare with the owner of a new file.
    with tempfile.TemporaryFile(dir=path.parent) as probe:
        owner = os.fstat(probe.fileno()).st_uid
    if status.st_uid != owner:
        raise ConfigError(
            f"{path}: belongs to another user (uid {status.st_uid}), so it can't be continued; remove it or "
            "choose another name"
        )


def _lock_without_flock(path: Path, patience_s: float, shared: bool) -> Callable[[], None]:
    """Lock by a file that names host and process, for a file system without flock; return the release function."""
    from filelock import SoftFileLock, Timeout  # imported here: few file systems need it

    if shared:
        raise ResourceError(
            f"{path.parent}: the file system does not support locks (flock), which shared files need; choose a "
            "local folder"
        )
    log.warning(
        "%s: the file system does not support locks (flock); a file with host and process id is used instead",
        path.parent,
    )
    lock = SoftFileLock(
        path.with_name(f"{path.name}.held"), -1 if patience_s == math.inf else patience_s, thread_local=False
    )
    try:
        lock.acquire()
    except Timeout as error:
        raise BlockingIOError(errno.EAGAIN, str(error)) from error
    return lock.release
