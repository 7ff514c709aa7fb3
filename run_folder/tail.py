"""Followers of the files that a run writes: one file of records, and all of a run merged by time.

They only read, and hold little of a file in memory: a file may appear late, end in a partial line, be replaced by a
resumed run, or be out of reach for a while. A line that can't be read is counted and passed over.
"""

import heapq
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from run_folder.metrics_log import Record, decode_record
from run_folder.paths import RunFolder, sample_files

logger = logging.getLogger(__name__)

HEAD_BYTES = 1 << 16
"""Bytes of a long file's beginning, which has the number of steps."""
_LINE_BYTES = 1 << 16
"""More than any line has."""


class RecordTail:
    """Follows one file of records, which may appear later.

    ``skip_present`` leaves out what the file has already. Of a file longer than ``recent_bytes`` only its beginning and
    this much of its end are read.

    Attributes:
        damaged: lines that could not be read.
        problem: the last damaged line in words.
        failure: why the file could not be read the last time; empty while it can, or is not there.
    """

    def __init__(self, path: Path, *, skip_present: bool = False, recent_bytes: int | None = None) -> None:
        self.path = path
        self.damaged = 0
        self.problem = self.failure = ""
        self._recent_bytes = recent_bytes
        self._inode: int | None = None
        self._offset = 0  # always at the start of a line
        self._last_s = self._given_until_s = -math.inf
        if skip_present:
            self._skip_present()

    def poll(self) -> Iterator[Record]:
        """Yield the records that are new since the last call, in the file's order; a partial last line waits.

        The file is read as records are taken, to where it ends now. Of a file that was replaced those are new whose
        time is later than that of all before: a resumed run repeats steps.
        """
        self.failure = ""
        try:
            with self.path.open("rb") as file:
                for line in self._new_lines(file):
                    try:
                        record = decode_record(line)
                    except ValueError as error:
                        self.damaged += 1
                        self.problem = f"{self.path}: {line[:60]!r} is passed over: {error}"
                        continue
                    time_s = record.get("time") or 0.0
                    self._last_s = max(self._last_s, time_s)
                    if time_s > self._given_until_s:
                        yield record
        except FileNotFoundError:
            return
        except OSError as error:
            self.failure = f"{self.path.name}: {error.strerror}"

    def _new_lines(self, file: BinaryIO) -> Iterator[bytes]:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset, self._given_until_s = status.st_ino, 0, self._last_s
            if self._recent_bytes is not None and status.st_size > self._recent_bytes + HEAD_BYTES:
                yield from file.read(HEAD_BYTES).splitlines(keepends=True)[:-1]
                file.seek(status.st_size - self._recent_bytes)
                file.readline()  # most likely not whole
                self._offset = file.tell()
        file.seek(self._offset)
        while self._offset < status.st_size and (line := file.readline()).endswith(b"\n"):
            self._offset += len(line)
            yield line

    def _skip_present(self) -> None:
        recent_bytes, self._recent_bytes = self._recent_bytes, _LINE_BYTES  # its last record says what is new
        deque(self.poll(), maxlen=0)
        self._recent_bytes = recent_bytes
        self.damaged = 0
        self.problem = self.failure = ""


class RunTail:
    """Follows the metrics, samples and alerts of a run.

    ``live`` gives only what is written from now on. ``warn`` is called with one line where a file can't be read, once
    for each cause.
    """

    def __init__(self, run: RunFolder, live: bool = False, warn: Callable[[str], None] = logger.warning) -> None:
        self._run = run
        self._warn = warn
        self._warned: set[str] = set()
        present = [run.metrics, run.alerts, *sample_files(run.monitoring)]
        self._tails = {path: RecordTail(path, skip_present=live) for path in present}

    def poll(self) -> Iterator[Record]:
        """Yield what is new since the last call by time, that of one file in the file's order.

        The files are read as records are taken; those that are not taken are lost.
        """
        for path in sample_files(self._run.monitoring):
            self._tails.setdefault(path, RecordTail(path))
        new = [self._new_records(tail) for tail in self._tails.values()]
        return heapq.merge(*new, key=lambda record: record.get("time") or 0.0)

    def _new_records(self, tail: RecordTail) -> Iterator[Record]:
        yield from tail.poll()
        for message in filter(None, (tail.problem, tail.failure)):
            if message not in self._warned:
                self._warned.add(message)
                self._warn(message)
