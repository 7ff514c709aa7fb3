"""Progress of a run at the terminal: one line that is kept up to date.

On a terminal it shows step, loss, tokens/s, learning rate, time left and last validation, above which warnings scroll
by; elsewhere a plain line now and then, and one for each validation, event and alert.
"""

import math
import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.text import amount, duration
from monitoring.watch.pace import Pace
from run_folder.metrics_log import MetricLabels, Record

MIN_BAR_COLUMNS = 150
"""Terminal width below which the bar gives way to the metrics."""
BAR_COLUMNS = 20
_STYLES = {"raised": "yellow", "validation": "dim"}
"""Of alerts by state, and of the words for metrics."""


class ProgressSink:
    """A progress line on ``stream``; where that is no terminal, a line every ``plain_every_s``.

    ``labels`` are the words for the metrics of validations.
    """

    def __init__(
        self,
        total_steps: int,
        labels: MetricLabels,
        stream: TextIO | None = None,
        plain_every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = sys.stdout if stream is None else stream
        self._state = state = _State(total_steps, labels)
        self._view: _Line | _PlainLines
        if stream.isatty():
            self._view = _Line(state, Console(file=stream))
        else:
            self._view = _PlainLines(state, stream, plain_every_s, clock)

    def write(self, record: Record) -> None:
        self._state.take(record)
        self._view.show(record)

    def close(self) -> None:
        self._view.close()


class _State:
    """The run's state in words."""

    def __init__(self, total_steps: int, labels: MetricLabels) -> None:
        self.total_steps, self.labels = total_steps, labels
        self.step = 0
        self._last: Record | None = None
        self._pace = Pace()
        self._validation: Record | None = None
        self._defined = False

    def take(self, record: Record) -> None:
        self._pace.take(record)
        if record["kind"] == "train":
            self.step, self._last = record["step"], record
        elif record["kind"] == "validation":
            self._validation = record
        elif record["kind"] == "event":  # the workers know the number of steps exactly, the driver from an estimate
            self.total_steps = record.get("total_steps", self.total_steps)

    def describe(self, columns: float = math.inf) -> str:
        """Step, loss, tokens/s, lr, time left and last validation, as far as known.

        Of a line longer than ``columns`` the learning rate is left out, then the speed, the loss and the time left.
        """
        parts = {"step": f"step {self.step}/{self.total_steps}"}
        if (last := self._last) is not None:
            parts["loss"] = f"loss {_number(last.get('loss'))}"
            parts["speed"] = f"{amount(self._pace.tokens_per_s() or 0.0)} tokens/s"
            if last.get("learning_rate") is not None:
                parts["rate"] = f"lr {last['learning_rate']:.2e}"
            if left_s := self._pace.seconds_left(self.total_steps):
                parts["left"] = f"{duration(left_s)} left"
            if last.get("skipped_steps"):
                parts["skipped"] = f"{last['skipped_steps']} skipped"
            if self._validation is not None:
                parts["validation"] = describe_validation(self._validation, self.labels)
        for name in ("rate", "speed", "loss", "left"):
            if len(" · ".join(parts.values())) <= columns:
                break
            parts.pop(name, None)
        return " · ".join(parts.values())

    def text(self, record: Record) -> str | None:
        """An event, an alert or the first validation's metrics in words; None for what is no line of its own."""
        if record["kind"] == "event":
            return describe_event(record)
        if record["kind"] == "alert":
            return describe_alert(record)
        return self._definitions()

    def _definitions(self) -> str | None:
        """The metrics of the first validation in words; None later, or where they need none."""
        if self._defined or self._validation is None:
            return None
        self._defined = True
        shown = [label for name, label in self.labels.items() if name in self._validation]
        return "\n".join(f"  {label.word}: {label.definition}" for label in shown if label.definition) or None


class _Line:
    """One line on a terminal, by rich, which also keeps what others print above it."""

    def __init__(self, state: _State, console: Console) -> None:
        self._state, self._console = state, console
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=4)
        self._live.start()

    def show(self, record: Record) -> None:
        text = self._state.text(record)
        if text and record.get("event") != "checkpoint":
            style = _STYLES.get(record.get("state") or record["kind"])
            self._console.print(text, markup=False, highlight=False, style=style)

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> Table:
        line, width = Table.grid(padding=(0, 1, 0, 0)), self._console.width
        bar = []
        if width >= MIN_BAR_COLUMNS:
            bar = [ProgressBar(self._state.total_steps, self._state.step, BAR_COLUMNS)]
            width -= BAR_COLUMNS + 1
        line.add_row(*bar, Text(self._state.describe(width), no_wrap=True, overflow="ellipsis"))
        return line


class _PlainLines:
    """Lines for a log file or a pipe."""

    def __init__(self, state: _State, stream: TextIO, every_s: float, clock: Callable[[], float]) -> None:
        self._state = state
        self._stream = stream
        self._every_s = every_s
        self._clock = clock
        self._next_s = -math.inf
        self._shown_step = 0

    def show(self, record: Record) -> None:
        if record["kind"] == "train":
            if self._clock() >= self._next_s or record["step"] >= self._state.total_steps:
                self._print_state()
        elif record["kind"] == "validation":
            self._print(f"step {record['step']}: {describe_validation(record, self._state.labels)}")
        text = self._state.text(record)
        if text:
            self._print(text)

    def close(self) -> None:
        if self._state.step != self._shown_step:
            self._print_state()

    def _print_state(self) -> None:
        self._print(self._state.describe())
        self._shown_step = self._state.step
        self._next_s = self._clock() + self._every_s

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def describe_validation(record: Record, labels: MetricLabels) -> str:
    """Return the loss of a validation record, and those metrics that have a word, in one phrase."""
    metrics = [
        f"{label.word} {record[name]:.3f}"
        for name, label in labels.items()
        if label.word is not None and record.get(name) is not None
    ]
    return ", ".join([f"validation loss {_number(record.get('loss'))}", *metrics])


def describe_event(record: Record) -> str | None:
    """An event in one phrase; None for those that the line itself or the end of the run reports."""
    step, event = record["step"], record["event"]
    if event in ("started", "finished", "stopped", "diverged", "failed"):
        return None
    if event == "checkpoint":
        return f"step {step}: checkpoint saved"
    if event == "exports_best":
        return f"the best checkpoint is {record.get('checkpoint', 'unknown')}, which is exported"
    if event == "resumed":
        return f"step {step}: resumed from {record.get('checkpoint', 'its checkpoint')}"
    if event == "nonfinite":
        return f"step {step}: loss or gradient not finite, update left out"
    if event == "memory_guard":
        return f"step {step}: {record['message']}"
    if "message" in record:
        return f"{event}: {record['message']}"
    details = [f"{name} {value}" for name, value in record.items() if name not in ("kind", "step", "event", "time")]
    return f"step {step}: {event.replace('_', ' ')}" + (f" ({', '.join(details)})" if details else "")


def describe_alert(record: Record) -> str:
    return f"{'warning' if record['state'] == 'raised' else 'over'}: {record['message']}"


def _number(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.4f}"
