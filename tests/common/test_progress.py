import io

from common import progress
from common.progress import ConversionProgress, conversion_bar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_bytes_and_records_and_a_pipe_nothing(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    for stream in (terminal := _Terminal(), pipe := io.StringIO()):
        monkeypatch.setattr(progress.sys, "stderr", stream)
        with conversion_bar("converting") as show:
            show(ConversionProgress(500_000, 1_000_000, 1234))
    for words in ("converting", "0.5/1.0 MB", "1,234 records"):
        assert words in terminal.getvalue()
    assert pipe.getvalue() == ""
