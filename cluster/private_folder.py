"""Folder of this user's own, in which Ray clusters that are started here live.

Ray (2.60) makes its folders 0777, whatever the umask: who else is on the machine could put links and sockets there,
which its processes and the service would follow. Nobody else gets into a folder of 0700 around them.
"""

import os
import pwd
import tempfile
from pathlib import Path

from esmeray.common.errors import ResourceError
from esmeray.common.publishing import writing

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
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder, "remove it, or name another place by RAY_TMPDIR")
    return folder / "ray"


def check_private(path: Path, remedy: str) -> None:
    """Refuse a folder or file that another user could have made or changed, or can read."""
    if not _is_private(path):
        raise ResourceError(f"{path}: is a link, or another user owns it or has access to it; {remedy}")


def _runtime_folder() -> str | None:
    """XDG_RUNTIME_DIR, if it is this user's alone and stays.

    systemd removes it at the logout, under a run that continues in tmux, unless the user lingers.
    """
    folder = Path(os.environ.get("XDG_RUNTIME_DIR", "/nowhere"))
    lingering = Path("/var/lib/systemd/linger", pwd.getpwuid(os.geteuid()).pw_name)
    is_removed = folder.parent == _OF_LOGINS and not lingering.exists()
    return str(folder) if folder.is_dir() and _is_private(folder) and not is_removed else None


def _is_private(path: Path) -> bool:
    facts = path.lstat()  # a link's own mode is 0777
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
