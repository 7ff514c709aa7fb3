"""Progress on stderr: of a conversion, by its bytes, of records that are computed, and a status line.

A terminal has a bar; a log a line now and then, so that a job of hours is not silent there.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

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

LOG_S = 30.0
"""Seconds between lines of a log; what takes less writes none."""


class ConversionProgress(NamedTuple):
    """Bytes of the source as it lies on disk (0 in all where it is no file), and records."""

    bytes_read: int
    bytes_total: int
    records: int


ProgressCallback = Callable[[ConversionProgress], None]


def no_progress(_progress: ConversionProgress) -> None:
    """Report nothing."""


@contextmanager
def conversion_bar(title: str) -> Iterator[ProgressCallback]:
    """A progress bar on stderr for as long as the block lasts; lines where stderr is no terminal."""
    with _bar(title, DownloadColumn()) as update:
        yield lambda progress: update(progress.bytes_read, progress.bytes_total or None, progress.records)


@contextmanager
def record_bar(title: str) -> Iterator[Callable[[float, int], None]]:
    """A progress bar as :func:`conversion_bar`; called with the share that is done, 0 to 1, and with the records."""
    with _bar(title, TaskProgressColumn()) as update:
        yield lambda share, records: update(share, 1.0, records)


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """A line on stderr that each call replaces; nothing where stderr is no terminal."""
    console = Console(file=sys.stderr)  # stdout is for results, which may go through a pipe
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield lambda text: status.update(Text(text))  # Text: brackets in a name are no markup of rich's


@contextmanager
def _bar(title: str, column: ProgressColumn) -> Iterator[Callable[[float, float | None, int], None]]:
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield _lines(title)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        column,
        TextColumn("{task.fields[records]:,} records"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, records=0)
        yield lambda done, total, records: bar.update(task, completed=done, total=total, records=records)


def _lines(title: str) -> Callable[[float, float | None, int], None]:
    """An update that writes a line to stderr where the last is :data:`LOG_S` ago."""
    written_s = [time.monotonic()]

    def update(done: float, total: float | None, records: int) -> None:
        if time.monotonic() - written_s[-1] >= LOG_S:
            written_s[:] = [time.monotonic()]
            print(f"{title}: {done / (total or done or 1):.0%}, {records:,} records", file=sys.stderr, flush=True)

    return update
