"""Local clusters use folders in which other users of the machine cannot read, write or plant links."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from esmeray.cluster import private_folder as module
from esmeray.cluster.private_folder import ray_folder
from esmeray.common.errors import ResourceError


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders for XDG_RUNTIME_DIR and TMPDIR with paths short enough for sockets."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(module, "_MAX_PATH_BYTES", 200)
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path / "temporary"))
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
    monkeypatch.setattr(module, "_MAX_PATH_BYTES", len(str(temporary)) - 1)
    assert ray_folder() == Path("/tmp", name, "ray")


def test_what_ends_with_the_login_is_not_chosen_where_runs_outlive_it(folders: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_OF_LOGINS", folders)
    monkeypatch.setattr(module.pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="nobody-who-lingers"))
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
        ResourceError, match=rf"^{folder}: is a symbolic link, or another user owns it or has access to it; remove"
    ):
        ray_folder()
