"""The thread of the driver that follows what a run writes about itself and hands each record to the sinks.

In: the files that the workers append to, metrics.jsonl and their samples, and the run's alerts. Out: calls of ``write``
on the sinks. What a sink does with a record is left to it; one that raises is reported once and dropped, and neither
the run nor the other sinks notice.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from run_folder.metrics_log import Record
from run_folder.tail import RunTail

logger = logging.getLogger(__name__)


@runtime_checkable
class Sink(Protocol):
    """Where records go.

    A sink gets only what is written while it listens, repeated steps included. It may also have a method ``tick()``,
    which is called at every look at the files, whether anything is new or not.
    """

    def write(self, record: Record) -> None:
        """Take one record. Called from one thread; should return at once."""

    def close(self) -> None:
        """No more records come."""


class RunWatcher:
    """Follows a run in a daemon thread.

    Args:
        metrics_path: the run's metrics.jsonl; may appear later.
        sinks: where each record goes, in this order.
        samples: folder of the workers' samples; may appear later, and so may workers. None: not followed.
        alerts: the run's alerts.jsonl, which a sink may write. None: not followed.
        poll_s: seconds between looks at the files.
        warn: what to call with the line that says that a sink was dropped, or a file is damaged.
    """

    def __init__(
        self,
        metrics_path: Path | str,
        sinks: Sequence[Sink],
        *,
        samples: Path | None = None,
        alerts: Path | None = None,
        poll_s: float = 0.5,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._path = Path(metrics_path)
        self._samples = samples
        self._alerts = alerts
        self._poll_s = poll_s
        self._warn = warn
        self._sinks = list(sinks)
        self._tail: RunTail | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="run-watcher", daemon=True)

    def start(self) -> RunWatcher:
        """Begin to follow. What is in the files at this moment is history, which sinks don't get."""
        self._tail = RunTail(self._path, self._samples, self._alerts, live=True, warn=self._warn)
        self._thread.start()
        return self

    def close(self, timeout_s: float = 30.0) -> None:
        """Hand over what is left in the file, then close the sinks. Returns after ``timeout_s`` at the latest."""
        self._closing.set()
        if not self._thread.ident:
            self._close_sinks()
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(f"the sinks of {self._path.name} did not close within {timeout_s:g} s and are left behind")

    def _watch(self) -> None:
        while not self._closing.wait(self._poll_s):
            self._pass_on()
        while self._pass_on():  # what sinks write because of the last records is passed on as well
            pass
        self._close_sinks()

    def _pass_on(self) -> bool:
        """One look at the files; returns whether another at once may find more."""
        more = False
        assert self._tail is not None  # the thread is started after it is made
        for record in self._tail.poll():
            more = True
            for sink in list(self._sinks):
                self._guarded(sink, sink.write, record)
        for sink in list(self._sinks):
            if (tick := getattr(sink, "tick", None)) is not None:
                self._guarded(sink, tick)
        return more

    def _close_sinks(self) -> None:
        for sink in list(self._sinks):
            self._guarded(sink, sink.close)

    def _guarded(self, sink: Sink, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - reported once, then the sink is out
            self._sinks.remove(sink)
            self._warn(f"{type(sink).__name__} failed and is left out from here on: {type(error).__name__}: {error}")
