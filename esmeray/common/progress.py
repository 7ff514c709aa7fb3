"""Progress on stderr: bars for conversions (in bytes) and for computed records, and a status line.

A terminal shows a bar. A log gets a line after 2 s and then every 30 s, also while a long step reports nothing.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import Event, Thread

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from esmeray.common.text import duration

FIRST_S, LOG_S = 2.0, 30.0
"""Seconds until the first line of a log, and between the lines after it."""
_SPEED_S = 300.0
"""Seconds over which speed is averaged, for the time left: updates of a slow job are minutes apart."""

_lines: list[Callable[[], str] | None] = []
"""Functions that return the log line of each open display, the innermost last; None if rich draws it on a terminal."""
_changed = Event()
"""Set when a display begins or ends."""


ProgressCallback = Callable[[float, float, int], None]
"""Function that gets the work done and its total, in bytes of the source (0 if it is no file), and the records."""


def no_progress(_done: float, _total: float, _records: int) -> None:
    """Report nothing."""


def conversion_bar(title: str) -> AbstractContextManager[ProgressCallback]:
    """A progress bar on stderr during the block; lines if stderr is no terminal."""
    return _bar(title, DownloadColumn())


@contextmanager
def record_bar(title: str) -> Iterator[Callable[[float, int], None]]:
    """Progress bar like :func:`conversion_bar`, updated with the completed fraction (0 to 1) and the records."""
    with _bar(title, TaskProgressColumn()) as update:
        yield lambda share, records: update(share, 1.0, records)


@contextmanager
def status_line(title: str = "starting") -> Iterator[Callable[[str], None]]:
    """Status line on stderr that each call replaces; if stderr is no terminal, the latest text is logged every 30 s."""
    console = Console(file=sys.stderr)  # stdout is for results, which may go through a pipe
    if console.is_terminal:
        with _display(None), console.status(Text(title)) as status:
            yield lambda text: status.update(Text(text))  # Text: brackets in a name are no rich markup
        return
    newest = deque([title], maxlen=1)
    with _display(lambda: newest[0]):
        yield newest.append


@contextmanager
def working(title: str) -> Iterator[None]:
    """Print the title now and then while the block shows no progress of its own, e.g. while torch is imported.

    A terminal gets lines, too: rich's displays would redirect the block's stdout to stderr.
    """
    with _display(lambda: title):
        yield


@contextmanager
def _bar(title: str, column: ProgressColumn) -> Iterator[ProgressCallback]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        column,
        TextColumn("{task.fields[records]:,} records"),
        TimeRemainingColumn(),
    )
    console = Console(file=sys.stderr)
    is_log = not console.is_terminal
    # For a log the bar is disabled, and only estimates the time left.
    bar = Progress(*columns, console=console, transient=True, disable=is_log, speed_estimate_period=_SPEED_S)
    number = bar.add_task(title, total=None, records=0)
    (task,) = bar.tasks

    def line() -> str:
        if task.total is None:
            return f"{title}: {task.fields['records']:,} records"
        left = f", {duration(task.time_remaining)} left" if task.time_remaining else ""
        return f"{title}: {task.percentage:.0f}%, {task.fields['records']:,} records{left}"

    with _display(line if is_log else None), bar:
        yield lambda done, total, records: bar.update(number, completed=done, total=total or None, records=records)


@contextmanager
def _display(line: Callable[[], str] | None) -> Iterator[None]:
    _start_log()
    _lines.append(line)
    _changed.set()
    try:
        yield
    finally:
        _lines.remove(line)
        _changed.set()


def _write_log() -> None:
    while True:
        wait_s = FIRST_S if _lines else None
        while not _changed.wait(wait_s):
            wait_s = LOG_S
            for line in filter(None, _lines[-1:]):
                print(line(), file=sys.stderr, flush=True)
        _changed.clear()


# A thread, since a step may report nothing for minutes. Only one, so that only the innermost display writes.
_start_log = cache(Thread(target=_write_log, daemon=True).start)
