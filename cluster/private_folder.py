"""Folder of this user's own, in which Ray clusters that are started here live.

Ray (2.60) makes its folders 0777, whatever the umask: who else is on the machine could put links and sockets there,
which its processes and the service would follow. Nobody else gets into a folder of 0700 around them.
"""

import os
import pwd
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from common.errors import ResourceError
from common.publishing import writing

KEPT_SESSIONS = 10
"""Sessions of Ray whose logs stay, 2 MB each: XDG_RUNTIME_DIR lies in memory."""
_OF_LOGINS = Path("/run/user")
_LINGERING = Path("/var/lib/systemd/linger")
_LONGEST_BYTES = 39
"""Of Ray's folder: a socket's path has at most 107 bytes, and session_*/sockets/dash_MetricsHead below it takes 68."""


def ray_folder() -> Path:
    """Folder for Ray's sessions, in the first place that leaves room for the names of its sockets.

    Raises ResourceError where it is a link, or another user owns it or may enter it.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    temporary = [os.environ.get("RAY_TMPDIR"), tempfile.gettempdir(), "/tmp"]
    places = [Path(place).absolute() / f"esmeray-{os.geteuid()}" for place in temporary if place]
    if "RAY_TMPDIR" not in os.environ and _is_usable(runtime):
        places.insert(0, runtime / "esmeray")
    folder = next(place for place in places if len(os.fsencode(place / "ray")) <= _LONGEST_BYTES)
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder, "remove it, or name another place by TMPDIR")
    return folder / "ray"


def check_private(path: Path, remedy: str) -> None:
    """Refuse a folder or file that another user could have made or changed, or can read."""
    if not _is_private(path):
        raise ResourceError(f"{path}: is a link, or another user owns it or has access to it; {remedy}")


def sweep(folder: Path) -> None:
    """Remove the oldest sessions whose cluster has ended; Ray (2.60) keeps all."""
    for session in sorted(folder.glob("session_2*"))[:-KEPT_SESSIONS]:
        with socket.socket(socket.AF_UNIX) as raylet:  # its process may be another container's
            has_ended = raylet.connect_ex(str(session / "sockets" / "raylet")) != 0
        if has_ended:
            shutil.rmtree(session, ignore_errors=True)


def _is_usable(runtime: Path) -> bool:
    """Test for a folder that is as XDG says and stays: systemd removes it when the user logs out, below a run that
    continues in tmux, unless the user lingers."""
    if not (runtime.is_absolute() and runtime.is_dir() and _is_private(runtime)):
        return False
    return runtime.parent != _OF_LOGINS or (_LINGERING / pwd.getpwuid(os.geteuid()).pw_name).exists()


def _is_private(path: Path) -> bool:
    facts = path.lstat()
    return not stat.S_ISLNK(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
