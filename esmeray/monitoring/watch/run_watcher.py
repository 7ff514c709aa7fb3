"""Driver thread that follows a run's files and passes each record to the sinks; the sink that draws curves.

A sink that raises is reported once and removed, without effect on the run or other sinks.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from esmeray.run_folder.metrics_log import MetricLabels, Record, RunTail, read_metrics
from esmeray.run_folder.paths import RunFolder


class Sink(Protocol):
    """Receiver of a run's records, including repeated steps; called from one thread."""

    def write(self, record: Record) -> None:
        """Process one record; should return at once."""

    def close(self) -> None:
        """Finish: no more records follow."""


CURVES_EVERY_S = 300.0
"""Minimum time between two drawings of a run's curves, in seconds."""


class CurvesSink:
    """Sink that draws a run's curves.png after a validation, at most every five minutes, and at the end."""

    def __init__(self, run: RunFolder, labels: MetricLabels) -> None:
        self._run, self._labels = run, labels
        self._drawn_s = time.monotonic()  # a short run draws at its end only

    def write(self, record: Record) -> None:
        if record["kind"] == "validation" and time.monotonic() - self._drawn_s >= CURVES_EVERY_S:
            self.close()
            self._drawn_s = time.monotonic()

    def close(self) -> None:
        from esmeray.monitoring.watch.curves import draw_curves  # imported here: it loads matplotlib

        if self._run.metrics.exists():
            draw_curves(read_metrics(self._run.metrics), self._run.curves, self._run.path.name, self._labels)


class RunWatcher:
    """Daemon thread that follows a run from now on and passes each new record to the sinks in order.

    ``warn`` is called if a sink is removed or a file is damaged.
    """

    def __init__(self, run: RunFolder, sinks: Sequence[Sink], warn: Callable[[str], None], poll_s: float = 0.5) -> None:
        self._sinks, self._poll_s, self._warn = list(sinks), poll_s, warn
        self._tail = RunTail(run, live=True, warn=warn)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="run-watcher", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 30.0) -> None:
        """Pass on the remaining records, then close the sinks. Returns after ``timeout_s`` at the latest."""
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(f"the run's displays did not close within {timeout_s:g} s and were abandoned")

    def _watch(self) -> None:
        while not self._closing.wait(self._poll_s):
            self._pass_on()
        while self._pass_on():  # sinks may write records in response to the last ones
            pass
        for sink in list(self._sinks):
            self._guarded(sink, sink.close)

    def _pass_on(self) -> bool:
        """Poll the files once; return whether there were records."""
        records = list(self._tail.poll())
        for record in records:
            for sink in list(self._sinks):  # a copy: failing sinks are removed
                self._guarded(sink, sink.write, record)
        return bool(records)

    def _guarded(self, sink: Sink, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - reported once, then the sink is out
            self._sinks.remove(sink)
            self._warn(f"{type(sink).__name__} failed and is disabled: {type(error).__name__}: {error}")
