"""The bar is for people: on a terminal it shows bytes and records, elsewhere nothing."""

from __future__ import annotations

import io

from common import progress
from common.progress import ConversionProgress, conversion_bar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_bytes_and_records(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with conversion_bar("converting") as show:
        show(ConversionProgress(500_000, 1_000_000, 1234))
    shown = terminal.getvalue()
    assert "converting" in shown
    assert "0.5/1.0 MB" in shown
    assert "1,234 records" in shown


def test_a_file_or_pipe_gets_nothing(monkeypatch):
    pipe = io.StringIO()
    monkeypatch.setattr(progress.sys, "stderr", pipe)
    with conversion_bar("converting") as show:
        show(ConversionProgress(5, 10, 1))
    assert pipe.getvalue() == ""
