"""Progress of a run: its pace over the last records, and a progress line.

On a terminal the line is updated in place, with warnings scrolling above it. Otherwise a plain line is printed at
intervals, and one for each validation, event and alert.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean, harmonic_mean
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from esmeray.common.text import amount, duration
from esmeray.run_folder.metrics_log import MetricLabels, Record

_STYLES = {"raised": "yellow", "validation": "dim"}
"""Styles of alerts by state, and of validation metrics."""
_EVENTS = {
    **dict.fromkeys(("started", "finished", "stopped", "resizing", "diverged", "failed"), ""),
    "checkpoint": "step {step}: checkpoint saved",
    "exports_best": "exporting the best checkpoint, {checkpoint}",
    "resumed": "step {step}: resumed from {checkpoint}",
    "resized": "step {step}: from {from} to {to} workers ({why})",
    "nonfinite": "step {step}: loss or gradient not finite, update skipped",
    "loss_scale_lowered": "step {step}: loss scale lowered",
    **dict.fromkeys(("memory_guard", "hung", "rewound"), "step {step}: {message}"),
}
"""Text of events; empty for events that the progress line or the end of the run reports."""
_STEPS = 50
"""Number of logged steps to average over."""


class Pace:
    """Averages over the last steps since the run started or was resumed; time between two attempts is excluded.

    ``step``, ``validation``: the last records. ``total_steps``: an estimate at first, which the workers correct.
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
        """Seconds from the start of this command's training to the last step."""
        return self.step["time"] - self._began_s if self.step and self._began_s is not None else 0.0

    def update(self, record: Record) -> None:
        if self._began_s is None:
            self._began_s = record.get("time")
        if record["kind"] == "event":
            self.total_steps = record.get("total_steps", self.total_steps)
            self._resumed |= record["event"] in ("started", "resumed")
        elif record["kind"] == "validation":
            self.validation = record
        elif record["kind"] == "train":
            # Repeated steps mean a resume: time between the two attempts would count as a step's.
            if self._resumed or (self.step is not None and record["step"] <= self.step["step"]):
                self._steps.clear()
            self._resumed = False
            self.step = record
            self._steps.append(record)

    def mean(self, name: str) -> float | None:
        known = [value for record in self._steps if (value := record.get(name)) is not None]
        return fmean(known) if known else None

    def tokens_per_s(self) -> float:
        """Return the harmonic mean: steps have similar sizes, so this is tokens per time. 0 if unknown."""
        rates = [rate for record in self._steps if (rate := record.get("tokens_per_s"))]
        return harmonic_mean(rates) if rates else 0.0

    def seconds_per_step(self) -> float | None:
        """Return wall-clock time per step, including validations and checkpoints."""
        if len(self._steps) < 2:  # a single step has only its own measurement
            return self.mean("step_s")
        first, last = self._steps[0], self._steps[-1]
        # Aligned by step numbers, since not every step is logged.
        return max(0.0, (last["time"] - first["time"]) / max(1, last["step"] - first["step"]))

    def seconds_left(self) -> float | None:
        step_s = self.seconds_per_step()
        return (
            None
            if step_s is None or self.total_steps is None
            else max(0.0, step_s * (self.total_steps - self._steps[-1]["step"]))
        )

    def shares(self) -> dict[str, float]:
        """Return the known shares of a step's time by phase."""
        step_s = self.mean("step_s")
        parts = ("data_wait", "forward", "backward", "optimizer", "communication", "checkpoint")
        seconds = {name: self.mean(f"{name}_s") for name in parts}
        # Phases that are not measured stay unknown, not zero.
        return {name: value / step_s for name, value in seconds.items() if step_s and value is not None}


class ProgressSink:
    """Progress line on ``stream``; ``labels`` name the validation metrics."""

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
        self._next_s = -math.inf  # the first step is printed immediately, to show that the run trains
        self._shown: Record | None = None  # last step of a plain line
        self._console = Console(file=self._stream)
        self._live: Live | None = None
        if self._stream.isatty():
            self._live = Live(get_renderable=self._draw, console=self._console, refresh_per_second=4)
            self._live.start()

    def write(self, record: Record) -> None:
        self._pace.update(record)
        kind, text = record["kind"], self._text(record)
        if self._live is not None:
            if text and record.get("event") != "checkpoint":  # checkpoints would scroll everything else off the screen
                self._console.print(text, markup=False, highlight=False, style=_STYLES.get(record.get("state") or kind))
            return
        # The last step is always printed.
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

    def _draw(self) -> Text:
        """Return the line for a terminal; rich keeps other output above it."""
        return Text(self._describe(), no_wrap=True, overflow="ellipsis")

    def _describe(self) -> str:
        """Return step, loss, skipped steps, time left, tokens/s, tokens and time so far, and lr, as far as known.

        The most important parts come first, since a narrow terminal cuts the end.
        """
        pace, last = self._pace, self._pace.step
        if last is None:
            return f"step 0/{pace.total_steps}"
        parts = [f"step {last['step']}/{pace.total_steps}", f"loss {loss_text(last)}"]
        if last.get("skipped_steps"):
            parts.append(f"{last['skipped_steps']} skipped")
        if left_s := pace.seconds_left():
            parts.append(f"{duration(left_s)} left")
        parts.append(f"{amount(pace.tokens_per_s())} tokens/s")
        if "tokens_seen" in last:
            # Losses of runs are comparable at equal tokens or time, not at equal steps.
            parts.append(f"after {amount(last['tokens_seen'])} tokens, {duration(pace.elapsed_s)}")
        if last.get("learning_rate") is not None:
            parts.append(f"lr {last['learning_rate']:.2e}")
        return " · ".join(parts)

    def _text(self, record: Record) -> str | None:
        """Return the text of an event, alert or validation, the first validation with definitions; None for others."""
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
    """Return the text of an event; None if it has none."""
    event = record["event"]
    if event in _EVENTS:
        return _EVENTS[event].format_map(record) or None
    if "message" in record:
        return f"{event}: {record['message']}"
    return f"step {record['step']}: {event}"


def describe_alert(record: Record) -> str:
    return f"{'warning' if record['state'] == 'raised' else 'over'}: {record['message']}"


def loss_text(record: Record) -> str:
    return "NaN" if record.get("loss") is None else f"{record['loss']:.4f}"
