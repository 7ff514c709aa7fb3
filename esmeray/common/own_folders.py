"""Private folders of this user: caches between commands, and files that no other user may read or plant.

They also work in containers, whose user may have no passwd entry, no HOME, or a read-only home.
"""

import os
import pwd
import tempfile
from contextlib import suppress
from pathlib import Path

from esmeray.common.errors import ResourceError
from esmeray.common.publishing import writing

_OF_LOGINS = Path("/run/user")
_MAX_PATH_BYTES = 39
"""Maximum length of Ray's folder: a socket's path has at most 107 bytes, and session_*/sockets/dash_MetricsHead below
the folder takes 68."""


def cache_folder(name: str) -> Path:
    """Folder ``esmeray/NAME`` in the user's cache folder, or, if that can't be written, in the temporary folder.

    Raises ResourceError if neither can be used.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache")) / "esmeray" / name
    with suppress(OSError, RuntimeError):
        folder = folder.expanduser()  # RuntimeError: neither HOME nor a passwd entry
        # 0700: code from it is executed, so no other user may write there.
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not os.access(folder, os.W_OK | os.X_OK):
        folder = own_folder(tempfile.gettempdir()) / name
        with writing(folder):
            folder.mkdir(exist_ok=True)
    return folder


def own_folder(parent: str | Path) -> Path:
    """Folder that only this user can enter, in a parent that may be shared, e.g. /tmp.

    Raises ResourceError if it is a link, or another user owns it or may enter it.
    """
    folder = Path(parent).absolute() / f"esmeray-{os.geteuid()}"
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder, "remove it, or set TMPDIR (for Ray: RAY_TMPDIR) to another folder")
    return folder


def check_private(path: Path, remedy: str) -> None:
    """Refuse a folder or file that another user could have made or changed, or can read."""
    if not is_private(path):
        raise ResourceError(f"{path}: is a symbolic link, or another user owns it or has access to it; {remedy}")


def is_private(path: Path) -> bool:
    facts = path.lstat()  # a link's own mode is 0777
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o077


def ray_folder() -> Path:
    """Folder for the sessions of Ray clusters that are started here, below the first parent that is short enough.

    Ray (2.60) creates its folders with mode 0777, whatever the umask. Other users could place links and sockets there,
    which Ray's processes and the service would follow. A parent folder with mode 0700 keeps them out.

    Raises ResourceError if the private folder is a link, or if another user owns it or can enter it.
    """
    parents = (os.environ.get("RAY_TMPDIR"), _runtime_folder(), tempfile.gettempdir(), "/tmp")
    folders = [Path(parent).absolute() / f"esmeray-{os.geteuid()}" for parent in parents if parent]
    # /tmp is always short enough.
    folder = next(folder for folder in folders if len(os.fsencode(folder / "ray")) <= _MAX_PATH_BYTES)
    return own_folder(folder.parent) / "ray"


def _runtime_folder() -> str | None:
    """XDG_RUNTIME_DIR, if it is private and permanent, otherwise None.

    systemd removes it at logout unless lingering is enabled, even if a run continues in tmux.
    """
    folder = Path(os.environ.get("XDG_RUNTIME_DIR", "/nowhere"))
    is_removed = folder.parent == _OF_LOGINS and not _lingers()
    return str(folder) if folder.is_dir() and is_private(folder) and not is_removed else None


def _lingers() -> bool:
    with suppress(KeyError):  # a container's user may have no entry in passwd
        return Path("/var/lib/systemd/linger", pwd.getpwuid(os.geteuid()).pw_name).exists()
    return False
