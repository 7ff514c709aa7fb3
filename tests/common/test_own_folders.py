"""Private folders: no other user can read, write or plant links in them, and users without a home have them, too."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from esmeray.common import own_folders
from esmeray.common.errors import ConfigError, ResourceError, expanded
from esmeray.common.own_folders import cache_folder, ray_folder
from tests.conftest import REPOSITORY

STRANGER = ["unshare", "--user", "--map-user=4711", "--map-group=4711"]
"""Command that runs a program as a user without an entry in passwd, as in containers; needs no root."""
PROGRAM = """
import json
import esmeray
from esmeray.common.own_folders import cache_folder, ray_folder
from pathlib import Path
import ray.train  # looks for the home

print(json.dumps([str(ray_folder()), str(cache_folder("kernels")), str(Path.home())]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run([*STRANGER, "true"], check=False).returncode != 0, reason="the kernel allows no user namespaces"
)
@pytest.mark.parametrize("home", [None, "/proc"], ids=["no home", "one that is read-only"])
def test_a_user_without_passwd_entry_has_caches_in_the_temporary_folder(tmp_path: Path, home: str | None):
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY),
        "TMPDIR": str(tmp_path),
        "XDG_RUNTIME_DIR": "/run/user/4711",  # of a login session, which this user does not have
    }
    environment |= {} if home is None else {"HOME": home}
    # Import Ray only once, as it takes longest.
    program = PROGRAM if home is None else PROGRAM.replace("import ray.train", "")
    output = subprocess.check_output([*STRANGER, sys.executable, "-c", program], env=environment, text=True)
    ray, kernels, found = json.loads(output)
    own = tmp_path / "esmeray-4711"
    # An explicitly set home stays unchanged.
    assert found == ("/proc" if home == "/proc" else str(own)) and own.stat().st_mode & 0o777 == 0o700
    assert ray.endswith("esmeray-4711/ray") and kernels.startswith(f"{own}/") and Path(kernels).is_dir()


def test_a_cache_that_cannot_be_written_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(own_folders.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = cache_folder("kernels")
    assert folder == tmp_path / f"esmeray-{os.geteuid()}" / "kernels" == cache_folder("kernels")


def test_a_missing_home_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^~no-such-user/runs: unknown user"):
        expanded("~no-such-user/runs")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders for XDG_RUNTIME_DIR and TMPDIR with paths short enough for sockets."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(own_folders, "_MAX_PATH_BYTES", 200)
    monkeypatch.setattr(own_folders.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path


def test_it_is_made_for_this_user_alone_in_the_first_place_that_fits(folders: Path, monkeypatch: pytest.MonkeyPatch):
    name = f"esmeray-{os.geteuid()}"
    temporary = folders / "temporary" / name / "ray"
    assert ray_folder() == folders / "runtime" / name / "ray"
    (folders / "runtime").chmod(0o755)
    assert ray_folder() == temporary and temporary.parent.stat().st_mode & 0o777 == 0o700
    assert ray_folder() == temporary, "it is there by now"
    monkeypatch.setattr(own_folders, "_MAX_PATH_BYTES", len(str(temporary)) - 1)
    assert ray_folder() == Path("/tmp", name, "ray")


def test_what_ends_with_the_login_is_not_chosen_where_runs_outlive_it(folders: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(own_folders, "_OF_LOGINS", folders)
    monkeypatch.setattr(own_folders.pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="nobody-who-lingers"))
    assert ray_folder().is_relative_to(folders / "temporary")


@pytest.mark.parametrize("made", ["link", "group", "other"])
def test_a_folder_that_others_could_enter_is_refused_in_one_line(folders: Path, made: str):
    folder = ray_folder().parent
    if made == "link":
        folder.rename(folders / "elsewhere")
        folder.symlink_to(folders / "elsewhere")
    elif made == "group":
        folder.chmod(0o710)
    elif os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
    else:
        pytest.skip("needs another user")
    with pytest.raises(
        ResourceError,
        match=rf"^{folder}: is a symbolic link, or another user owns it or has access to it; remove it, or set TMPDIR",
    ):
        ray_folder()
