"""Private folder for the Ray clusters that this user starts on this machine.

Ray (2.60) creates its folders with mode 0777, whatever the umask. Other users could place links and sockets there,
which Ray's processes and the service would follow. A parent folder with mode 0700 keeps them out.
"""

import os
import pwd
import tempfile
from contextlib import suppress
from pathlib import Path

from esmeray.common.own_folders import is_private, own_folder

_OF_LOGINS = Path("/run/user")
_MAX_PATH_BYTES = 39
"""Maximum length of Ray's folder: a socket's path has at most 107 bytes, and session_*/sockets/dash_MetricsHead below
the folder takes 68."""


def ray_folder() -> Path:
    """Folder for Ray's sessions, below the first parent that is short enough for the paths of Ray's sockets.

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
