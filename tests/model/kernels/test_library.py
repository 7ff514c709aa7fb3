"""A kernel is compiled once, by whoever comes first, and what can't be compiled is done another way."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from model.kernels import library

SOURCE = 'extern "C" int answer() { return ANSWER; }'


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    (tmp_path / "small.cpp").write_text(SOURCE)
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.load.cache_clear()
    yield tmp_path / "cache" / "esmeray" / "kernels"
    library.load.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    """The commands that were run to compile."""
    commands = []
    run = subprocess.run

    def counted(command, **arguments):
        commands.extend([command] if "-shared" in command else [])
        return run(command, **arguments)

    monkeypatch.setattr(library.subprocess, "run", counted)
    return commands


def test_a_kernel_is_compiled_once_and_found_again(empty_cache, compilations):
    assert library.load("small", ANSWER=4) is not None
    library.load.cache_clear()  # as another process would come
    assert library.load("small", ANSWER=4) is not None
    assert len(compilations) == 1
    assert [path.suffix for path in empty_cache.iterdir()] == [".so"]


def test_each_set_of_constants_is_a_library_of_its_own(empty_cache):
    assert [library.load("small", ANSWER=answer).answer() for answer in (4, 6)] == [4, 6]
    assert len(list(empty_cache.iterdir())) == 2


def test_several_at_once_leave_one_whole_library(empty_cache):
    with ThreadPoolExecutor(2) as pool:
        loaded = list(pool.map(lambda _: library.load.__wrapped__("small", ANSWER=4), range(2)))
    assert all(loaded) and len(list(empty_cache.iterdir())) == 1


def test_without_a_compiler_there_is_a_warning_and_no_library(monkeypatch, caplog):
    monkeypatch.setattr(library.shutil, "which", lambda _: None)
    assert library.load("small", ANSWER=4) is None
    assert "install g++ or clang++" in caplog.text


def test_a_source_that_does_not_compile_is_told_with_the_compilers_words(caplog, empty_cache):
    assert library.load("small", ANSWER="nonsense") is None
    assert "could not be compiled" in caplog.text and "nonsense" in caplog.text
    assert list(empty_cache.iterdir()) == []


def test_a_compiler_that_knows_no_native_flags_is_asked_without_them(monkeypatch, compilations):
    monkeypatch.setattr(library, "_MACHINE_FLAGS", (("-march=unheard-of",), ()))
    assert library.load("small", ANSWER=4) is not None
    assert len(compilations) == 2


def test_a_cache_that_cannot_be_written_is_replaced_by_a_folder_of_this_process(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert library.load("small", ANSWER=4) is not None
