"""``python -m tools watch``: one picture or a live one, of a run in any state, and nothing that disturbs it."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from run_folder.paths import Outcome
from tests.monitoring.watch.test_run_view import Run, train

ROOT = Path(__file__).parents[2]
LEAVES_SCREEN = "\x1b[?1049l"
"""What a terminal is told when a program gives its screen back."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "mine").started(10).metrics(*(train(step) for step in range(1, 6)))


class Terminal:
    """``watch`` on a terminal of its own."""

    def __init__(self, *arguments: object) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools", "watch", *map(str, arguments)],
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "110", "LINES": "50"},
        )
        os.close(slave)
        self.text = ""

    def until(self, words: str) -> None:
        """Read until ``words`` were shown."""
        deadline = time.monotonic() + 120
        while words not in self.text:
            assert time.monotonic() < deadline, self.text[-2000:]
            if select.select([self._master], [], [], 1)[0]:
                self.text += os.read(self._master, 65536).decode(errors="replace")

    def end(self) -> int:
        """Read the rest; the exit code."""
        while True:
            try:
                block = os.read(self._master, 65536)
            except OSError:
                break
            if not block:
                break
            self.text += block.decode(errors="replace")
        os.close(self._master)
        return self.process.wait(60)


def test_once_prints_one_picture_and_writes_nothing(command, run):
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.path.iterdir()}
    outcome = command("watch", run.path, "--once")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("step 5/10") == 1
    assert "\x1b" not in outcome.out
    assert outcome.err == ""
    assert command("watch", run.path).out.count("step 5/10") == 1, "into a pipe"
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.path.iterdir()} == before


def test_run_that_is_not_there_yet_is_shown(command, tmp_path):
    outcome = command("watch", tmp_path / "soon")
    assert outcome.code == 0
    assert "not begun" in outcome.out


def test_what_is_no_run_is_refused_with_what_may_be_meant(command, run, tmp_path):
    (tmp_path / "file").write_text("")
    for name, inside in (("other", "thing"), ("search", "tune.yaml")):
        (tmp_path / name).mkdir()
        (tmp_path / name / inside).write_text("")
    cases = {
        "file": "not the folder of a run",
        "other": "not the folder of a run",
        "a/b": "not the folder of a run",
        "mime": "did you mean mine?",
        ".": "holds the runs mine",
        "search": "is a throughput search",
    }
    for name, words in cases.items():
        outcome = command("watch", tmp_path / name, "--once")
        assert outcome.code == 2
        assert words in outcome.err
        assert outcome.err.count("\n") == 1


def test_svg_is_whole_and_fetches_nothing(command, run, tmp_path):
    outcome = command("watch", run.path, "--once", "--svg", tmp_path / "picture.svg")
    assert outcome.code == 0, outcome.err
    svg = (tmp_path / "picture.svg").read_text()
    ElementTree.fromstring(svg)
    assert "5/10" in svg
    assert "url(http" not in svg
    assert "@font-face" not in svg


def test_terminal_follows_the_run_and_ends_with_it(run):
    terminal = Terminal(run.path, "--interval", 0.1)
    terminal.until("5/10")
    run.metrics(*(train(step) for step in range(6, 11)))
    terminal.until("10/10")
    run.files.write_outcome(Outcome("finished", 10, "trained 10 steps", 0))
    assert terminal.end() == 0
    assert "trained 10 steps" in terminal.text.split(LEAVES_SCREEN)[1]  # the last picture is left standing


def test_ctrl_c_ends_the_watching_and_leaves_the_last_picture(run):
    terminal = Terminal(run.path, "--interval", 30)
    terminal.until("5/10")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text
    assert "5/10" in terminal.text.split(LEAVES_SCREEN)[1]
