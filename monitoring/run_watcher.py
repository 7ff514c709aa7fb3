"""The thread of the driver that follows a run's metrics.jsonl and hands each record to the sinks.

In: the file that training rank 0 appends to. Out: calls of ``write`` on the sinks. What a sink does with a record is
left to it; one that raises is reported once and dropped, and neither the run nor the other sinks notice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from monitoring.metrics_log import MetricsTail, Record

logger = logging.getLogger(__name__)


@runtime_checkable
class Sink(Protocol):
    """Where records go.

    A sink may say ``live = True`` as a class attribute: it then gets only what is written while it listens, repeated
    steps included. Otherwise it gets the run from its first record, each step once, also after a restart.
    """

    def write(self, record: Record) -> None:
        """Take one record. Called from one thread; should return at once."""

    def close(self) -> None:
        """No more records come."""


class RunWatcher:
    """Follows ``metrics_path`` in a daemon thread.

    Args:
        metrics_path: the run's metrics.jsonl; may appear later.
        sinks: where each record goes, in this order.
        poll_s: seconds between looks at the file.
        warn: what to call with the line that says that a sink was dropped.
    """

    def __init__(
        self,
        metrics_path: Path | str,
        sinks: Sequence[Sink],
        poll_s: float = 0.5,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._path = Path(metrics_path)
        self._poll_s = poll_s
        self._warn = warn
        self._sinks = list(sinks)
        self._tails: dict[bool, MetricsTail] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="run-watcher", daemon=True)

    def start(self) -> RunWatcher:
        """Begin to follow. What is in the file at this moment is history, which live sinks don't get."""
        self._tails = {live: MetricsTail(self._path, live=live) for live in {_is_live(sink) for sink in self._sinks}}
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
        self._pass_on()
        self._close_sinks()

    def _pass_on(self) -> None:
        for live, tail in self._tails.items():
            try:
                records = tail.poll()
            except Exception as error:  # noqa: BLE001 - reported; the run must not end for its log
                self._warn(f"can't follow {self._path}: {error}")
                time.sleep(self._poll_s)
                continue
            for sink in [sink for sink in self._sinks if _is_live(sink) == live]:
                for record in records:
                    if not self._guarded(sink, sink.write, record):
                        break

    def _close_sinks(self) -> None:
        for sink in list(self._sinks):
            self._guarded(sink, sink.close)

    def _guarded(self, sink: Sink, call: Callable[..., None], *arguments: Any) -> bool:
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - reported once, then the sink is out
            self._sinks.remove(sink)
            self._warn(f"{type(sink).__name__} failed and is left out from here on: {type(error).__name__}: {error}")
            return False
        return True


def _is_live(sink: Sink) -> bool:
    return bool(getattr(sink, "live", False))
