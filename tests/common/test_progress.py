import io

from esmeray.common import progress
from esmeray.common.progress import ConversionProgress, conversion_bar, record_bar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_bytes_and_records_and_a_log_nothing_of_what_is_short(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    for stream in (terminal := _Terminal(), pipe := io.StringIO()):
        monkeypatch.setattr(progress.sys, "stderr", stream)
        with conversion_bar("converting") as show:
            show(ConversionProgress(500_000, 1_000_000, 1234))
    for words in ("converting", "0.5/1.0 MB", "1,234 records"):
        assert words in terminal.getvalue()
    assert pipe.getvalue() == ""


def test_a_log_has_a_line_now_and_then(monkeypatch, capsys):
    times = iter([0.0, 29.0, 31.0, 31.0, 40.0, 62.0, 62.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    with record_bar("embedding") as show:
        for done in (1, 2, 3, 4):
            show(done / 4, done * 1000)
    assert capsys.readouterr().err == "embedding: 50%, 2,000 records\nembedding: 100%, 4,000 records\n"
