"""Progress of a run: its pace, by its last records, and a line about it.

On a terminal the line is kept up to date, and warnings scroll by above it; elsewhere a plain line comes now and then,
and one for each validation, event and alert.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean, harmonic_mean
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esmeray.common.text import amount, duration
from esmeray.monitoring.advice import Facts
from esmeray.run_folder.metrics_log import MetricLabels, Record

BAR_COLUMNS = 20
_STYLES = {"raised": "yellow", "validation": "dim"}
"""Of alerts by state, and of the words for metrics."""
_EVENTS = {
    **dict.fromkeys(("started", "finished", "stopped", "resizing", "diverged", "failed"), ""),
    "checkpoint": "step {step}: checkpoint saved",
    "exports_best": "the best checkpoint is {checkpoint}, which is exported",
    "resumed": "step {step}: resumed from {checkpoint}",
    "resized": "step {step}: from {from} to {to} workers ({why})",
    "nonfinite": "step {step}: loss or gradient not finite, update left out",
    **dict.fromkeys(("memory_guard", "hung", "rewound"), "step {step}: {message}"),
    "weights_differ": "{message}",
}
"""Words for events; none for those that the line itself or the end of the run reports."""
_NO_STEP: Record = {"step": 0}
_STEPS = 50
"""Logged steps over which everything is averaged."""


class Pace:
    """The last steps since the run began or was resumed: what lies between two attempts is no part of a step.

    ``step``, ``validation``: the last records. ``total_steps``: first an estimate, which the workers correct.
    """

    def __init__(self, total_steps: int | None = None) -> None:
        self.total_steps = total_steps
        self.step: Record | None = None
        self.validation: Record | None = None
        self._steps: deque[Record] = deque(maxlen=_STEPS)
        self._resumed = False
        self._began_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since this command's training began, by the last step's time."""
        return self.step["time"] - self._began_s if self.step and self._began_s is not None else 0.0

    def take(self, record: Record) -> None:
        if self._began_s is None:
            self._began_s = record.get("time")
        if record["kind"] == "event":
            self.total_steps = record.get("total_steps", self.total_steps)
            self._resumed |= record["event"] in ("started", "resumed")
        elif record["kind"] == "validation":
            self.validation = record
        elif record["kind"] == "train":
            # Steps that come again were taken before: the time between the two attempts would count as a step's.
            if self._resumed or (self.step is not None and record["step"] <= self.step["step"]):
                self._steps.clear()
            self._resumed = False
            self.step = record
            self._steps.append(record)

    def mean(self, name: str) -> float | None:
        known = [value for record in self._steps if (value := record.get(name)) is not None]
        return fmean(known) if known else None

    def tokens_per_s(self) -> float:
        """Return the harmonic mean: steps are of like size, so that these are tokens over time. 0 where unknown."""
        rates = [rate for record in self._steps if (rate := record.get("tokens_per_s"))]
        return harmonic_mean(rates) if rates else 0.0

    def seconds_per_step(self) -> float | None:
        """Return the time by the clock, validations and checkpoints included."""
        if len(self._steps) < 2:  # between one step and itself no time passes: its own measurement stands in
            return self.mean("step_s")
        first, last = self._steps[0], self._steps[-1]
        # By the numbers of the steps: not every step is logged.
        return max(0.0, (last["time"] - first["time"]) / max(1, last["step"] - first["step"]))

    def seconds_left(self) -> float | None:
        step_s = self.seconds_per_step()
        return (
            None
            if step_s is None or self.total_steps is None
            else max(0.0, step_s * (self.total_steps - self._steps[-1]["step"]))
        )

    def facts(self) -> Facts:
        """Return the shares of a step that its parts take, as far as they are known."""
        step_s = self.mean("step_s")
        if not step_s:
            return Facts()
        parts = ("data_wait", "forward", "backward", "optimizer", "communication", "checkpoint")
        seconds = {name: self.mean(f"{name}_s") for name in parts}
        # Parts that a run does not measure stay unknown: a share of zero would be a fact.
        shares: dict[str, Any] = {name: value / step_s for name, value in seconds.items() if value is not None}
        return Facts(**shares)


class ProgressSink:
    """A progress line on ``stream``; ``labels`` are the words for the metrics of validations."""

    def __init__(
        self,
        total_steps: int,
        labels: MetricLabels,
        stream: TextIO | None = None,
        plain_every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._labels, self._plain_every_s, self._clock = labels, plain_every_s, clock
        self._pace = Pace(total_steps)
        self._defined = False
        self._next_s = -math.inf  # the first step is a line: that the run trains is news
        self._shown: Record | None = None  # last step of a plain line
        self._console = Console(file=self._stream)
        self._live: Live | None = None
        if self._stream.isatty():
            self._live = Live(get_renderable=self._draw, console=self._console, refresh_per_second=4)
            self._live.start()

    def write(self, record: Record) -> None:
        self._pace.take(record)
        kind, text = record["kind"], self._text(record)
        if self._live is not None:
            if text and record.get("event") != "checkpoint":  # those would scroll all else off the screen
                self._console.print(text, markup=False, highlight=False, style=_STYLES.get(record.get("state") or kind))
            return
        # The last step in any case: it is what a log is read for.
        is_due = self._clock() >= self._next_s or record["step"] >= (self._pace.total_steps or 0)
        if kind == "train" and is_due:
            self._print_state()
        if text:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._pace.step is not self._shown:
            self._print_state()

    def _print_state(self) -> None:
        print(self._describe(), file=self._stream, flush=True)
        self._shown = self._pace.step
        self._next_s = self._clock() + self._plain_every_s

    def _draw(self) -> Table:
        """The line on a terminal, by rich, which keeps what others print above it."""
        line, width = Table.grid(padding=(0, 1, 0, 0)), self._console.width
        bar = []
        if width >= 150:  # else it gives way to the metrics
            bar = [ProgressBar(self._pace.total_steps, (self._pace.step or _NO_STEP)["step"], BAR_COLUMNS)]
            width -= BAR_COLUMNS + 1
        line.add_row(*bar, Text(self._describe(width), no_wrap=True, overflow="ellipsis"))
        return line

    def _describe(self, columns: float = math.inf) -> str:
        """Step, loss, tokens and time that led to it, tokens/s, lr and time left, as far as known.

        Of a line longer than ``columns`` these are left out first: lr, what led to the loss, speed, loss, time left.
        """
        pace, last = self._pace, self._pace.step or _NO_STEP
        parts = {"step": f"step {last['step']}/{pace.total_steps}"}
        if pace.step is not None:
            parts["loss"] = f"loss {loss_text(last)}"
            if "tokens_seen" in last:
                # A loss compares with that of another run at equal tokens or time, not at equal steps.
                parts["seen"] = f"after {amount(last['tokens_seen'])} tokens, {duration(pace.elapsed_s)}"
            parts["speed"] = f"{amount(pace.tokens_per_s())} tokens/s"
            if last.get("learning_rate") is not None:
                parts["rate"] = f"lr {last['learning_rate']:.2e}"
            if left_s := pace.seconds_left():
                parts["left"] = f"{duration(left_s)} left"
            if last.get("skipped_steps"):
                parts["skipped"] = f"{last['skipped_steps']} skipped"
        # In the order in which they are missed least.
        for name in ("rate", "seen", "speed", "loss", "left"):
            if len(" · ".join(parts.values())) <= columns:
                break
            parts.pop(name, None)
        return " · ".join(parts.values())

    def _text(self, record: Record) -> str | None:
        """An event, an alert or a validation in words, the first one with its metrics' definitions; None for others."""
        if record["kind"] == "event":
            return describe_event(record)
        if record["kind"] == "alert":
            return describe_alert(record)
        if record["kind"] != "validation":
            return None
        lines = [f"step {record['step']}: {describe_validation(record, self._labels)}"]
        if not self._defined:
            self._defined = True
            shown = [label for name, label in self._labels.items() if name in record]
            lines += [f"  {label.word}: {label.definition}" for label in shown if label.definition]
        return "\n".join(lines)


def describe_validation(record: Record, labels: MetricLabels) -> str:
    metrics = [
        f"{label.word} {record[name]:.3f}"
        for name, label in labels.items()
        if label.word is not None and record.get(name) is not None
    ]
    return ", ".join([f"validation loss {loss_text(record)}", *metrics])


def describe_event(record: Record) -> str | None:
    """An event in one phrase; None for those that have none."""
    event = record["event"]
    if event in _EVENTS:
        return _EVENTS[event].format_map(record) or None
    if "message" in record:
        return f"{event}: {record['message']}"
    details = [f"{name} {value}" for name, value in record.items() if name not in ("kind", "step", "event", "time")]
    return f"step {record['step']}: {event.replace('_', ' ')}" + (f" ({', '.join(details)})" if details else "")


def describe_alert(record: Record) -> str:
    return f"{'warning' if record['state'] == 'raised' else 'over'}: {record['message']}"


def loss_text(record: Record) -> str:
    return "NaN" if record.get("loss") is None else f"{record['loss']:.4f}"
