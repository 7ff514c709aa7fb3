"""Files that appear complete or not at all, and a bar that shows how far they are."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dataset.publishing import sync, writing


@contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` to write to: renamed when the block ends, removed when it raises.

    Raises:
        ResourceError: the disk is full or can't be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            yield temporary
            sync(temporary)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a whole file or nothing."""
    with complete_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


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
