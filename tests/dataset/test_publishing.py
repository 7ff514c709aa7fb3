"""A folder appears complete or not at all, and one process at a time builds it."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path

import pytest

from dataset.publishing import exclusive, published
from train_config.errors import ResourceError


def build(target: Path, text: str) -> None:
    with exclusive(target), published(target) as folder:
        (folder / "file").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_built_appears_under_its_name_and_nothing_else_stays(tmp_path):
    build(tmp_path / "deep" / "target", "a")
    assert (tmp_path / "deep" / "target" / "file").read_text() == "a"
    assert names(tmp_path / "deep") == ["target"]


def test_a_target_is_replaced_as_a_whole(tmp_path):
    build(tmp_path / "target", "a")
    (tmp_path / "target" / "more").write_text("old")
    build(tmp_path / "target", "b")
    assert names(tmp_path) == ["target"]
    assert names(tmp_path / "target") == ["file"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(tmp_path, error):
    with pytest.raises(error), exclusive(tmp_path / "target"), published(tmp_path / "target") as folder:
        (folder / "file").write_text("half")
        raise error
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "no room left.* GB free"), (errno.EDQUOT, "no room left"), (errno.EROFS, "can't be")],
)
def test_refusals_to_write_are_worded(tmp_path, number, words):
    with pytest.raises(ResourceError, match=words), published(tmp_path / "target"):
        raise OSError(number, os.strerror(number))
    assert names(tmp_path) == []


def test_a_place_that_can_not_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ResourceError, match="can't be written"):
        build(tmp_path / "file" / "target", "a")


def test_leftovers_of_this_target_alone_are_swept(tmp_path):
    for name in (".target.building-1", ".target.replaced-1", ".target2.building-1", ".targets.building-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("half")
    build(tmp_path / "target", "a")
    assert names(tmp_path) == [".target2.building-1", ".targets.building-1", "target"]


def test_a_folder_set_aside_by_a_killed_replacement_comes_back(tmp_path):
    build(tmp_path / "target", "old")
    (tmp_path / "target").rename(tmp_path / ".target.replaced-1")
    with exclusive(tmp_path / "target"):
        assert (tmp_path / "target" / "file").read_text() == "old"


def _build_slowly(target: Path, number: int) -> None:
    with exclusive(target):
        if target.exists():
            return
        with published(target) as folder:
            (folder / "file").write_text("x" * 100_000)
            os.sync()
            (folder / f"by-{number}").touch()


def test_of_many_at_once_one_builds_and_the_others_find_it(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_build_slowly, args=(tmp_path / "target", number)) for number in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(names(tmp_path / "target")) == 2
    assert names(tmp_path) == ["target"]
