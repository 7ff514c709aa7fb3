import io
import time

import pytest

from esmeray.common import progress
from esmeray.common.progress import conversion_bar, record_bar, status_line, working


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def soon(monkeypatch) -> None:
    monkeypatch.setattr(progress, "FIRST_S", 0.01)
    monkeypatch.setattr(progress, "LOG_S", 0.01)


def lines_until(text: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines of stderr, returned as soon as one contains the text."""
    error = ""
    while text not in error:
        time.sleep(0.01)
        error += capsys.readouterr().err
    return error.splitlines()


def test_a_terminal_shows_progress_and_a_log_nothing_of_short_work(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    for stream in (terminal := _Terminal(), pipe := io.StringIO()):
        monkeypatch.setattr(progress.sys, "stderr", stream)
        with conversion_bar("converting") as show:
            show(500_000, 1_000_000, 1234)
    for words in ("converting", "0.5/1.0 MB", "1,234 records"):
        assert words in terminal.getvalue()
    assert pipe.getvalue() == ""


def test_a_log_has_progress_lines_with_the_time_left(soon, capsys):
    with record_bar("embedding") as show:
        assert lines_until("embedding", capsys)[0] == "embedding: 0 records"
        for done in (1, 2):
            show(done / 4, done * 1000)
            time.sleep(0.1)  # a speed needs some elapsed time
        assert lines_until("left", capsys)[-1].startswith("embedding: 50%, 2,000 records, ")
    with status_line() as show:
        show("first")
        show("loading [model]")
        assert "loading [model]" in lines_until("loading", capsys)


def test_of_displays_within_each_other_the_innermost_writes(soon, capsys):
    with working("embed plot: working"):
        lines_until("embed plot: working", capsys)
        with record_bar("drawing"):
            lines_until("drawing", capsys)
            assert {*lines_until("drawing", capsys)} == {"drawing: 0 records"}
        lines_until("embed plot: working", capsys)
