"""What a person sees while a benchmark runs: a line on stderr that says what is being measured and for how long.

Where stderr is no terminal there is none; the results that are printed as they come are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Line:
    """The progress line: how many stages are done, which one runs, and what it does."""

    def __init__(self, show: Callable[[int, str], None]) -> None:
        self._show = show
        self._done = 0
        self._prefix = ""

    def stage(self, name: str) -> None:
        """A stage begins."""
        self._prefix = name
        self.doing("preparing")

    def doing(self, what: str) -> None:
        """What the stage does now."""
        self._show(self._done, f"{self._prefix} · {what}")

    def finished_stage(self) -> None:
        """The stage is through, or broke."""
        self._done += 1


@contextmanager
def progress_line(num_stages: int) -> Iterator[Line]:
    """The line, for as long as the block lasts."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield Line(lambda _done, _text: None)
        return
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=16),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=num_stages)
        yield Line(lambda done, text: bar.update(task, completed=done, description=escape(text)))
