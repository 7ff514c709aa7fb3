import errno
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from esmeray.common.errors import ConfigError, DataError, ResourceError
from esmeray.common.publishing import (
    atomic_file,
    check_names,
    exclusive,
    made_file,
    made_folder,
    published,
    write_atomically,
)


def build(target: Path, text: str) -> None:
    with exclusive(target), published(target) as folder:
        (folder / "file").write_text(text)


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
    [(errno.ENOSPC, "no room left.* GB free"), (errno.EDQUOT, "no room left"), (errno.EROFS, "can't be")],
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


@pytest.mark.parametrize("replacing", [False, True])
def test_what_the_killed_holder_of_the_lock_left_is_swept_and_what_it_set_aside_comes_back(tmp_path, replacing):
    others = [".target.building-1", ".target.building-thesis", ".target.replaced-1", ".targets.building-1"]
    for name in others:
        (tmp_path / name).mkdir()
    build(tmp_path / "target", "old")
    process = multiprocessing.get_context("fork").Process(target=_build_and_die, args=(tmp_path / "target",))
    process.start()
    process.join()
    left = f".target.building-{process.pid}"
    assert names(tmp_path) == sorted([*others, left, ".target.lock", "target"])
    if replacing:
        (tmp_path / "target").rename(tmp_path / f".target.replaced-{process.pid}")
    with exclusive(tmp_path / "target"):
        assert (tmp_path / "target" / "file").read_text() == "old"
    assert names(tmp_path) == sorted([*others, "target"])


def test_a_lock_of_others_is_refused(tmp_path):
    (tmp_path / ".target.lock").write_text("a thesis")
    with pytest.raises(ConfigError, match=r"\.target\.lock: is no lock of Esmeray's; move it away"):
        build(tmp_path / "target", "b")
    assert (tmp_path / ".target.lock").read_text() == "a thesis"


def _build_and_die(target: Path) -> None:
    with exclusive(target), published(target):
        os._exit(1)


def make_folder(target: Path, text: str, overwrite: bool = False, made_by: str = "export") -> None:
    with made_folder(target, made_by, overwrite) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text(text)


def make_file(target: Path, text: str, overwrite: bool = False, made_by: str = "export") -> None:
    with made_file(target, made_by, overwrite) as path:
        path.write_text(text)


MAKERS = {make_folder: "deep/file", make_file: ""}


@pytest.mark.parametrize("make", MAKERS)
def test_what_a_tool_made_is_replaced_by_the_same_tool_and_only_when_asked(tmp_path, make):
    target = tmp_path / "target"
    if make is make_folder:
        target.mkdir()  # an empty one may be taken
    make(target, "a")
    with pytest.raises(ConfigError, match="exists already; choose another name or pass --overwrite"):
        make(target, "b")
    with pytest.raises(ConfigError, match="was not made by predict, so it is not overwritten"):
        make(target, "b", overwrite=True, made_by="predict")
    assert (target / MAKERS[make]).read_text() == "a"
    make(target, "c", overwrite=True)
    make(target, "d", overwrite=True)
    assert (target / MAKERS[make]).read_text() == "d"
    assert set(names(tmp_path)) <= {"target", ".target.esmeray.json"}


def foreign(kind: str, target: Path, make) -> None:
    """Something in the place of a target that ``make`` did not make, or not alone."""
    if kind == "link":
        target.symlink_to(target.parent / "nothing")
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
def test_what_is_someone_elses_is_never_replaced(tmp_path, make, kind):
    foreign(kind, tmp_path / "target", make)
    before = {path: path.lstat().st_ino for path in tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match=r"was not made by|symbolic link|was changed since|holds notes|is a folder"):
        make(tmp_path / "target", "c", overwrite=True)
    assert {path: path.lstat().st_ino for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    "name", ["", ".", "/etc/passwd", "..", "../victim", "a/../../b", "a\0b", 300 * "a", 2000 * "a/"], ids=range(9)
)
def test_a_manifest_that_lists_what_lies_elsewhere_is_refused(tmp_path, name):
    make_folder(tmp_path / "target", "a")
    manifest = tmp_path / "target" / "esmeray.json"
    manifest.write_text(json.dumps({"made_by": "export", "files": {name: "0"}}))
    with pytest.raises(DataError, match="is no name of a file in its folder"):
        make_folder(tmp_path / "target", "b", overwrite=True)
    with pytest.raises(DataError, match="3 is no name of a file in its folder"):
        check_names(["a/b", 3], manifest)


@pytest.mark.parametrize("made", [made_folder, made_file])
def test_what_appeared_meanwhile_is_not_replaced(tmp_path, made):
    target = tmp_path / "target"
    with pytest.raises(ConfigError, match="exists already"), made(target, "export", False) as building:
        (building / "file" if building.is_dir() else building).write_text("a")
        target.write_text("a thesis")
    assert target.read_text() == "a thesis" and names(tmp_path) == ["target"]


@pytest.mark.parametrize("make", MAKERS)
def test_a_place_that_is_no_folder_is_refused_before_the_work(tmp_path, make):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ResourceError, match=r"can't be written: .*/file is no folder"):
        make(tmp_path / "file" / "target", "a")
    assert names(tmp_path) == ["file"]


def test_files_are_readable_as_the_umask_says_whatever_a_library_gave_them(tmp_path):
    with exclusive(tmp_path / "target"), published(tmp_path / "target") as folder:
        (folder / "file").touch(0o600)
    before = os.umask(0)
    os.umask(before)
    assert (tmp_path / "target" / "file").stat().st_mode & 0o777 == 0o666 & ~before
