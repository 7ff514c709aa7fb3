import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from esmeray.training.engine.deepspeed_setup import compiling_alone

VARIABLE = "TORCH_EXTENSIONS_DIR"

KILLED_WHILE_COMPILING = """
import os, signal
from pathlib import Path
from esmeray.training.engine.deepspeed_setup import compiling_alone
with compiling_alone():
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "operator"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    (folder / "finished.o").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def test_the_mark_of_a_killed_compilation_is_removed_and_its_work_kept(cache):
    killed = subprocess.run([sys.executable, "-c", KILLED_WHILE_COMPILING], check=False)
    assert killed.returncode == -signal.SIGKILL
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


def test_the_environment_s_own_tools_compile_whether_it_is_activated_or_not(cache, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with compiling_alone():
        assert os.environ["PATH"] == f"{Path(sys.prefix) / 'bin'}:/usr/bin:/bin"
    assert os.environ["PATH"] == "/usr/bin:/bin"
