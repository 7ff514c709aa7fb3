"""Private folders of this user: caches between commands, and files that no other user may read or plant.

They also work in containers, whose user may have no passwd entry, no HOME, or a read-only home.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from esmeray.common.errors import ResourceError
from esmeray.common.publishing import writing


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
