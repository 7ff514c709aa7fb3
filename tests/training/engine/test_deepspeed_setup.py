import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from esmeray.training.engine.deepspeed_setup import compiling_alone

VARIABLE = "TORCH_EXTENSIONS_DIR"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def compile_until_killed() -> None:
    with compiling_alone():
        folder = Path(os.environ[VARIABLE]) / "operator"
        folder.mkdir(parents=True)
        (folder / "lock").touch()
        (folder / "finished.o").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_mark_of_a_killed_compilation_is_removed_and_its_work_kept(cache):
    killed = multiprocessing.get_context("fork").Process(target=compile_until_killed)
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert len(list(cache.rglob("operator/lock"))) == 1
    with compiling_alone():
        folder = Path(os.environ[VARIABLE])
        assert [path.name for path in (folder / "operator").iterdir()] == ["finished.o"]
        assert folder.is_relative_to(cache)
    assert VARIABLE not in os.environ


def test_a_folder_of_the_user_s_choice_is_left_alone(cache, monkeypatch):
    mark = cache / "mine" / "operator" / "lock"
    mark.parent.mkdir(parents=True)
    mark.touch()
    monkeypatch.setenv(VARIABLE, str(cache / "mine"))
    with compiling_alone():
        assert os.environ[VARIABLE] == str(cache / "mine")
    assert mark.exists() and os.environ[VARIABLE] == str(cache / "mine")
