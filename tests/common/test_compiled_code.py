import logging
import shutil
from pathlib import Path

import pytest

from esmeray.common import compiled_code


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled_code.load.cache_clear()
    yield tmp_path / "cache" / "esmeray" / "kernels"
    compiled_code.load.cache_clear()


def source(folder: Path, text: str = 'extern "C" int answer() { return 42; }') -> Path:
    path = folder / "answer.cpp"
    path.write_text(text)
    return path


needs_compiler = pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler")


@needs_compiler
def test_compiled_code_is_kept_for_each_set_of_constants(tmp_path, own_cache, monkeypatch):
    path = source(tmp_path, 'extern "C" int answer() { return ANSWER; }')
    assert [compiled_code.load(path, ANSWER=answer).answer() for answer in (4, 6)] == [4, 6]
    libraries = set(own_cache.iterdir())
    compiled_code.load.cache_clear()
    monkeypatch.setattr(compiled_code, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiled_code.load(path, ANSWER=4).answer() == 4
    assert set(own_cache.iterdir()) == libraries and len(libraries) == 2


@needs_compiler
def test_a_source_that_does_not_compile_is_a_warning(tmp_path, own_cache, caplog):
    with caplog.at_level(logging.WARNING):
        assert compiled_code.load(source(tmp_path, "no C++ at all")) is None
    assert "answer.cpp could not be compiled" in caplog.text
    assert list(own_cache.iterdir()) == []


def test_no_compiler_is_a_warning_with_the_remedy(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert compiled_code.load(source(tmp_path)) is None
    assert "install g++ or clang++" in caplog.text


@needs_compiler
def test_unknown_flags_and_a_read_only_cache_do_not_stop_compilation(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_code, "_MACHINE_FLAGS", (("-march=unheard-of",), ()))
    monkeypatch.setattr(compiled_code, "_OPENMP_FLAGS", ("-funheard-of",))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiled_code.load(source(tmp_path), openmp=True).answer() == 42
