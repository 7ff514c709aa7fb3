"""Clusters that are started here live where no other user of the machine can read, write or plant links."""

import os
import socket
from pathlib import Path

import pytest

from cluster import private_folder as module
from cluster.private_folder import KEPT_SESSIONS, check_private, ray_folder, sweep
from common.errors import ResourceError


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders for XDG_RUNTIME_DIR and TMPDIR, whose names are short enough for sockets."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(module, "_LONGEST_BYTES", 200)
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path


def test_it_is_made_for_this_user_alone_in_the_first_place_that_fits(places: Path, monkeypatch: pytest.MonkeyPatch):
    temporary = places / "temporary" / f"esmeray-{os.geteuid()}" / "ray"
    assert ray_folder() == places / "runtime" / "esmeray" / "ray"
    (places / "runtime").chmod(0o755)
    assert ray_folder() == temporary and temporary.parent.stat().st_mode & 0o777 == 0o700
    assert ray_folder() == temporary, "it is there by now"
    monkeypatch.setattr(module, "_LONGEST_BYTES", len(str(temporary)) - 1)
    assert ray_folder() == Path("/tmp", *temporary.parts[-2:])


def test_what_ends_with_the_login_is_not_chosen_where_runs_outlive_it(places: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_OF_LOGINS", places)
    monkeypatch.setattr(module, "_LINGERING", places / "linger")
    assert ray_folder().is_relative_to(places / "temporary")
    (places / "linger" / module.pwd.getpwuid(os.geteuid()).pw_name).mkdir(parents=True)
    assert ray_folder().is_relative_to(places / "runtime")


@pytest.mark.parametrize("made", ["link", "group", "other"])
def test_one_that_others_could_have_made_or_may_enter_is_refused_in_one_line(places: Path, made: str):
    folder = ray_folder().parent
    if made == "link":
        folder.rename(places / "elsewhere")
        folder.symlink_to(places / "elsewhere")
    elif made == "group":
        folder.chmod(0o710)
    elif os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
    else:
        pytest.skip("needs another user")
    with pytest.raises(
        ResourceError, match=f"^{folder}: is a link, or another user owns it or has access to it; remove"
    ):
        ray_folder()


def test_the_oldest_sessions_whose_cluster_has_ended_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # else the socket's path is too long
    sessions = [Path("ray", f"session_2026-01-{day:02}") for day in range(1, KEPT_SESSIONS + 4)]
    for session in sessions:
        (session / "sockets").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.bind(str(sessions[1] / "sockets" / "raylet"))
        raylet.listen()
        sweep(Path("ray"))
    assert sorted(Path("ray").iterdir()) == [sessions[1], *sessions[3:]]
    sweep(Path("ray"))
    assert sorted(Path("ray").iterdir()) == sessions[3:]


def test_a_file_that_its_owner_alone_reads_is_private(tmp_path: Path):
    file = tmp_path / "token"
    file.touch(mode=0o600)
    check_private(file, "")
    file.chmod(0o640)
    with pytest.raises(ResourceError, match="has access to it; chmod"):
        check_private(file, "chmod 600")
