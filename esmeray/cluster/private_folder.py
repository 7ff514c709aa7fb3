"""Folder of this user's own, in which Ray clusters that are started here live.

Ray (2.60) makes its folders 0777, whatever the umask: who else is on the machine could put links and sockets there,
which its processes and the service would follow. Nobody else gets into a folder of 0700 around them.
"""

import os
import pwd
import tempfile
from contextlib import suppress
from pathlib import Path

from esmeray.common.own_folders import is_private, own_folder

_OF_LOGINS = Path("/run/user")
_LONGEST_BYTES = 39
"""Of Ray's folder: a socket's path has at most 107 bytes, and session_*/sockets/dash_MetricsHead below it takes 68."""


def ray_folder() -> Path:
    """Folder for Ray's sessions, in the first place that leaves room for the names of its sockets.

    Raises ResourceError where it is a link, or another user owns it or may enter it.
    """
    folders = [
        Path(parent).absolute() / f"esmeray-{os.geteuid()}"
        for parent in (os.environ.get("RAY_TMPDIR"), _runtime_folder(), tempfile.gettempdir(), "/tmp")
        if parent
    ]
    # Ray's sockets lie in it, and /tmp is short enough for any user's.
    folder = next(folder for folder in folders if len(os.fsencode(folder / "ray")) <= _LONGEST_BYTES)
    return own_folder(folder.parent) / "ray"


def _runtime_folder() -> str | None:
    """XDG_RUNTIME_DIR, if it is this user's alone and stays.

    systemd removes it at the logout, under a run that continues in tmux, unless the user lingers.
    """
    folder = Path(os.environ.get("XDG_RUNTIME_DIR", "/nowhere"))
    is_removed = folder.parent == _OF_LOGINS and not _lingers()
    return str(folder) if folder.is_dir() and is_private(folder) and not is_removed else None


def _lingers() -> bool:
    with suppress(KeyError):  # a container's user may have no entry in passwd
        return Path("/var/lib/systemd/linger", pwd.getpwuid(os.geteuid()).pw_name).exists()
    return False
