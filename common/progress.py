"""What a conversion says while it runs, and the bar that shows it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


class ConversionProgress(NamedTuple):
    """How far a conversion is.

    Attributes:
        bytes_read: of the source as it lies on disk, compressed or not.
        bytes_total: of the source; 0 when it is not read from files.
        records: read so far.
    """

    bytes_read: int
    bytes_total: int
    records: int


ProgressCallback = Callable[[ConversionProgress], None]


@contextmanager
def conversion_bar(title: str) -> Iterator[ProgressCallback]:
    """A progress bar on stderr for as long as the block lasts; nothing where stderr is no terminal."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[records]:,} records"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, records=0)

        def show(progress: ConversionProgress) -> None:
            bar.update(
                task,
                completed=progress.bytes_read,
                total=progress.bytes_total or None,
                records=progress.records,
            )

        yield show
