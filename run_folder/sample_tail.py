"""Follows everything that a run writes about itself: its metrics, the samples of each worker, its alerts.

In: the paths of metrics.jsonl, of the folder in which each worker has a file of samples, and of alerts.jsonl. Any of
them may appear late, and so may workers. Out: their records, by the time at which they were measured, those of one file
in the file's order.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from common.errors import DataError
from run_folder.metrics_log import MetricsTail, Record

logger = logging.getLogger(__name__)

SAMPLE_FILES = "worker-*.jsonl"


class RunTail:
    """Follows a run.

    Args:
        metrics: the run's metrics.jsonl.
        samples: folder of the workers' samples; None leaves them out.
        alerts: the run's alerts.jsonl; None leaves it out.
        live: as for :class:`~run_folder.metrics_log.MetricsTail`: only what is written from now on.
        warn: called with one line where a file can't be read, once for each cause.
    """

    def __init__(
        self,
        metrics: Path,
        samples: Path | None = None,
        alerts: Path | None = None,
        live: bool = False,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._samples = samples
        self._live = live
        self._warn = warn
        self._warned: set[str] = set()
        fixed = [path for path in (metrics, alerts) if path is not None]
        self._tails = {path: MetricsTail(path, live) for path in [*fixed, *self._sample_files()]}

    def poll(self) -> Iterator[Record]:
        """What is new since the last call. The files are read as records are taken: little of them is held at a time.

        Those that are not taken are lost.
        """
        for path in self._sample_files():
            if path not in self._tails:  # all of a file that was not there before is new
                self._tails[path] = MetricsTail(path, self._live, history=True)
        new = [self._new_records(path, tail) for path, tail in self._tails.items()]
        return heapq.merge(*new, key=lambda record: record.get("time") or 0.0)

    def _new_records(self, path: Path, tail: MetricsTail) -> Iterator[Record]:
        while True:
            try:
                yield from tail.poll()
            except DataError as error:
                self._warn_once(str(error))
                continue  # behind the damaged line
            except OSError as error:
                self._warn_once(f"can't follow {path}: {error}")
            return

    def _sample_files(self) -> list[Path]:
        return [] if self._samples is None else sorted(self._samples.glob(SAMPLE_FILES))

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)
