import errno
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from esmeray.common.errors import ConfigError, DataError, ResourceError
from esmeray.common.publishing import (
    atomic_file,
    check_names,
    exclusive,
    locks,
    made_file,
    made_folder,
    outputs,
    published,
    take_lock,
    write_atomically,
)
from esmeray.run_folder.job import held


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path):
    write_atomically(tmp_path / "file", "a")
    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert (tmp_path / "file").read_text() == "a"
    write_atomically(tmp_path / "file", b"b")
    assert (tmp_path / "file").read_text() == "b"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "no space left.* GB free"), (errno.EDQUOT, "no space left"), (errno.EROFS, "can't be")],
)
def test_refusals_to_write_are_worded_and_leave_nothing(tmp_path, number, words):
    with (
        pytest.raises(ResourceError, match=words),
        exclusive(tmp_path / "target"),
        published(tmp_path / "target") as at,
    ):
        (at / "file").write_text("half")
        raise OSError(number, os.strerror(number))
    assert names(tmp_path) == []


def in_a_fork(call: Callable[[], object]) -> None:
    """Call in a forked process that ends without cleanup."""
    process = multiprocessing.get_context("fork").Process(target=lambda: (call(), os._exit(1)))
    process.start()
    process.join()


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("moment", ["building", "renamed", "exchanged", "removing"])
def test_after_a_kill_there_is_the_old_or_the_new_folder(tmp_path, monkeypatch, moment, exchange):
    others = [".target.scratch-thesis", ".target.building-1", ".targets.scratch-1"]
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis").touch()
    target = tmp_path / "target"
    make_folder(target, "old")
    if not exchange:
        monkeypatch.setattr(outputs, "_exchange", no_exchange)

    def killed() -> None:
        if moment == "building":
            with made_folder(target, "export", True):
                die()
        step = {"exchanged": "sync", "removing": "rmtree"}.get(moment)
        if step == "sync":  # the last sync is of the target's parent folder
            monkeypatch.setattr(outputs, "sync", lambda path: path == tmp_path and die())
        elif step:
            monkeypatch.setattr(outputs.shutil, step, die)
        else:
            monkeypatch.setattr(Path, "rename", lambda path, to, rename=Path.rename: (rename(path, to), die()))
            monkeypatch.setattr(outputs, "_exchange", no_exchange)
        make_folder(target, "new", overwrite=True)

    in_a_fork(killed)
    left = names(tmp_path)
    assert len([name for name in left if name.startswith(".target.scratch-")]) == 2
    assert moment == "renamed" or (target / "deep" / "file").exists()
    # The same command without --overwrite is refused, since the output is there, old or new; what was left is gone.
    with pytest.raises(ConfigError, match="already exists"):
        make_folder(target, "new")
    text = (target / "deep" / "file").read_text()
    assert text == ("new" if moment in ("exchanged", "removing") else "old")
    assert names(tmp_path) == sorted([*others, "target"])


def no_exchange(first: Path, second: Path) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_a_rename_that_fails_leaves_the_old_folder(tmp_path, monkeypatch):
    make_folder(tmp_path / "target", "old")
    monkeypatch.setattr(outputs, "_exchange", no_exchange)
    renames = []

    def second_fails(path: Path, to: Path, rename: Callable[..., Path] = Path.rename) -> Path:
        renames.append(to)
        if len(renames) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(ResourceError, match="target: can't be written: Input/output error"):
        make_folder(tmp_path / "target", "new", overwrite=True)
    assert (tmp_path / "target" / "deep" / "file").read_text() == "old" and names(tmp_path) == ["target"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_behind_a_link_the_output_is_replaced_and_the_link_stays(tmp_path, kind):
    make = make_folder if kind == "folder" else make_file
    (tmp_path / "disk").mkdir()
    target = tmp_path / "target"
    target.symlink_to("disk/output")
    make(target, "old")
    (tmp_path / "disk" / "output").chmod(0o700)
    make(target, "new", overwrite=True)
    assert target.is_symlink() and (target / MAKERS[make]).read_text() == "new"
    assert (tmp_path / "disk" / "output").stat().st_mode & 0o677 == 0o600
    assert names(tmp_path) == ["disk", "target"]


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder"])
def test_a_lock_that_links_to_a_users_file_is_refused(tmp_path, kind):
    victim = tmp_path / "victim"
    victim.write_text("a thesis")
    lock = tmp_path / "output.partial" / ".lock"
    lock.parent.mkdir()
    {"link": lock.symlink_to, "hard link": lock.hardlink_to, "pipe": os.mkfifo, "folder": Path.mkdir}[kind](
        *{"pipe": [lock], "folder": [lock]}.get(kind, [victim])
    )
    with pytest.raises(ConfigError, match=r"\.lock: is not a regular file"):
        take_lock(lock, 0)
    assert victim.read_text() == "a thesis"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_folders_and_locks_of_another_user_are_refused(tmp_path):
    for path, make, act in (
        (tmp_path / "folder", Path.mkdir, lambda path: held(path).__enter__()),
        (tmp_path / "lock", Path.touch, lambda path: take_lock(path, 0)),
    ):
        make(path)
        os.chown(path, 4711, 4711)
        with pytest.raises(ConfigError, match=rf"{path.name}: belongs to another user \(uid 4711\)"):
            act(path)


def test_a_lock_is_taken_if_the_file_system_maps_users(tmp_path, monkeypatch):
    take_lock(tmp_path / "lock", 0).close()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)  # NFS maps root to another user id
    with closing(take_lock(tmp_path / "lock", 0)), pytest.raises(BlockingIOError):
        take_lock(tmp_path / "lock", 0)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_without_flock_a_lock_file_keeps_a_second_process_away(tmp_path, monkeypatch, number, caplog):
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    lock = take_lock(tmp_path / ".lock", 0)
    with pytest.raises(BlockingIOError):
        take_lock(tmp_path / ".lock", 0)
    lock.close()
    in_a_fork(lambda: (take_lock(tmp_path / ".lock", 0), die()))
    make_folder(tmp_path / "target", "a")
    assert "the file system does not support locks (flock)" in caplog.text
    take_lock(tmp_path / ".lock", 0).close()
    assert names(tmp_path) == [".lock", "target"]
    with pytest.raises(
        ResourceError, match=r"does not support locks \(flock\), which shared files need; choose a local folder"
    ):
        take_lock(tmp_path / ".lock", shared=True)


def test_an_error_at_another_file_is_not_called_one_of_writing(tmp_path):
    for error in (ConnectionResetError(104, "reset"), FileNotFoundError(2, "gone", str(tmp_path / "target.fasta"))):
        with pytest.raises(type(error)), made_folder(tmp_path / "target", "export", False):
            raise error
    assert names(tmp_path) == []


def test_a_lock_of_others_is_refused(tmp_path):
    (tmp_path / ".target.lock").write_text("a thesis")
    with pytest.raises(ConfigError, match=r"\.target\.lock: is not an Esmeray lock file; move it away"):
        make_folder(tmp_path / "target", "b")
    assert (tmp_path / ".target.lock").read_text() == "a thesis"


def make_folder(target: Path, text: str, overwrite: bool = False, made_by: str = "export") -> None:
    with made_folder(target, made_by, overwrite) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text(text)


def make_file(target: Path, text: str, overwrite: bool = False, made_by: str = "export") -> None:
    with made_file(target, made_by, overwrite) as path:
        path.write_text(text)


MAKERS = {make_folder: "deep/file", make_file: ""}


@pytest.mark.parametrize("make", MAKERS)
def test_an_output_is_replaced_by_the_same_tool_and_on_request_only(tmp_path, make):
    target = tmp_path / "target"
    if make is make_folder:
        target.mkdir()  # an empty one may be taken
    make(target, "a")
    with pytest.raises(ConfigError, match="already exists; choose another name or pass --overwrite"):
        make(target, "b")
    with pytest.raises(ConfigError, match="was not written by predict, so it is not overwritten"):
        make(target, "b", overwrite=True, made_by="predict")
    assert (target / MAKERS[make]).read_text() == "a"
    make(target, "c", overwrite=True)
    make(target, "d", overwrite=True)
    assert (target / MAKERS[make]).read_text() == "d"
    assert set(names(tmp_path)) <= {"target", ".target.esmeray.json"}


def foreign(kind: str, target: Path, make) -> None:
    """Write a target that ``make`` did not create, or add foreign files to one that it did."""
    if kind == "link":
        target.symlink_to(target.parent / "thesis")
        (target.parent / "thesis").write_text("a thesis")
    elif kind == "file":
        target.write_text("a thesis")
    elif kind == "folder":
        target.mkdir()
        (target / "thesis").write_text("a thesis")
    elif kind == "changed" or make is make_file:
        make(target, "a")
        (target / MAKERS[make]).write_text("b")
    else:
        make(target, "a")
        (target / "notes").symlink_to(target.parent)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", ["file", "folder", "link", "changed", "a link in it"])
def test_foreign_or_changed_outputs_are_never_replaced(tmp_path, make, kind):
    foreign(kind, tmp_path / "target", make)
    before = {path: path.lstat().st_ino for path in tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match=r"was not written by|has changed since|contains notes|is a folder"):
        make(tmp_path / "target", "c", overwrite=True)
    assert {path: path.lstat().st_ino for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    "name", ["", ".", "/etc/passwd", "..", "../victim", "a/../../b", "a\0b", 300 * "a", 2000 * "a/"], ids=range(9)
)
def test_a_manifest_with_names_outside_its_folder_is_refused(tmp_path, name):
    make_folder(tmp_path / "target", "a")
    manifest = tmp_path / "target" / "esmeray.json"
    manifest.write_text(json.dumps({"made_by": "export", "files": {name: "0"}}))
    with pytest.raises(DataError, match="is not the name of a file in its folder"):
        make_folder(tmp_path / "target", "b", overwrite=True)
    with pytest.raises(DataError, match="3 is not the name of a file in its folder"):
        check_names(["a/b", 3], manifest)


@pytest.mark.parametrize("made", [made_folder, made_file])
def test_an_output_that_appeared_meanwhile_is_not_replaced(tmp_path, made):
    target = tmp_path / "target"
    with pytest.raises(ConfigError, match="already exists"), made(target, "export", False) as building:
        (building / "file" if building.is_dir() else building).write_text("a")
        target.write_text("a thesis")
    assert target.read_text() == "a thesis" and names(tmp_path) == ["target"]


@pytest.mark.parametrize("make", MAKERS)
def test_a_target_below_a_file_is_refused_before_the_work(tmp_path, make):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ResourceError, match=r"can't be written: .*/file is not a folder"):
        make(tmp_path / "file" / "target", "a")
    assert names(tmp_path) == ["file"]


def test_files_are_readable_as_the_umask_says_whatever_a_library_gave_them(tmp_path):
    with exclusive(tmp_path / "target"), published(tmp_path / "target") as folder:
        (folder / "file").touch(0o600)
    before = os.umask(0)
    os.umask(before)
    assert (tmp_path / "target" / "file").stat().st_mode & 0o777 == 0o666 & ~before
