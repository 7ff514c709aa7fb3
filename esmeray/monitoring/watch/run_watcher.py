"""The thread of the driver that follows what a run writes and hands each record to the sinks; the sink of its curves.

A sink that raises is reported once and dropped, and neither the run nor the other sinks notice.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from esmeray.run_folder.metrics_log import MetricLabels, Record, RunTail, read_metrics
from esmeray.run_folder.paths import RunFolder


class Sink(Protocol):
    """Receiver of what a run writes while it listens, repeated steps included; called from one thread."""

    def write(self, record: Record) -> None:
        """Take one record; should return at once."""

    def close(self) -> None:
        """End: no more records come."""


class CurvesSink:
    """Draws curves.png of a run after a validation, at most every ``every_s`` seconds, and at the end."""

    def __init__(self, run: RunFolder, labels: MetricLabels, every_s: float = 300.0) -> None:
        self._run, self._labels, self._every_s = run, labels, every_s
        self._drawn_s = time.monotonic()  # a short run draws at its end only

    def write(self, record: Record) -> None:
        if record["kind"] == "validation" and time.monotonic() - self._drawn_s >= self._every_s:
            self.close()
            self._drawn_s = time.monotonic()

    def close(self) -> None:
        from esmeray.monitoring.watch.curves import draw_curves  # here: it loads matplotlib

        if self._run.metrics.exists():
            draw_curves(read_metrics(self._run.metrics), self._run.curves, self._run.path.name, self._labels)


class RunWatcher:
    """Follows a run from now on in a daemon thread: each new record goes to the sinks in order.

    ``warn`` is called with the line that says that a sink was dropped, or a file is damaged.
    """

    def __init__(self, run: RunFolder, sinks: Sequence[Sink], warn: Callable[[str], None], poll_s: float = 0.5) -> None:
        self._sinks, self._poll_s, self._warn = list(sinks), poll_s, warn
        self._tail = RunTail(run, live=True, warn=warn)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="run-watcher", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 30.0) -> None:
        """Hand over the remaining records, then close the sinks. Returns after ``timeout_s`` at the latest."""
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(f"what shows the run did not close within {timeout_s:g} s and is left behind")

    def _watch(self) -> None:
        while not self._closing.wait(self._poll_s):
            self._pass_on()
        while self._pass_on():  # what sinks write because of the last records is passed on as well
            pass
        for sink in list(self._sinks):
            self._guarded(sink, sink.close)

    def _pass_on(self) -> bool:
        """One look at the files; returns whether another at once may find more."""
        records = list(self._tail.poll())
        for record in records:
            for sink in list(self._sinks):  # a copy: one that fails is removed
                self._guarded(sink, sink.write, record)
        return bool(records)

    def _guarded(self, sink: Sink, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - reported once, then the sink is out
            self._sinks.remove(sink)
            self._warn(f"{type(sink).__name__} failed and is left out from here on: {type(error).__name__}: {error}")
