"""A bar that shows how far a tool is with its records."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Bar = Callable[[float, int], None]
"""Told the share that is done and how many records that is."""


@contextmanager
def record_bar(title: str) -> Iterator[Bar]:
    """A bar on stderr while the block lasts; nothing where stderr is no terminal."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda share, records: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[records]:,} records"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=1.0, records=0)
        yield lambda share, records: bar.update(task, completed=share, records=records)
