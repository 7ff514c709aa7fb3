"""metrics.jsonl: what a run measured, one JSON object a line; its writer, its reader, and followers of a run.

Training rank 0 writes it, everything else (progress line, W&B, curves) reads it. A record has a ``kind`` ("train",
"validation" or "event"), a ``step`` and a ``time`` (Unix seconds). NaN and infinities, which JSON lacks, become null,
and the record then carries ``"nonfinite": true``. A line ends in its ``crc32``. The files of samples and alerts are of
the same make, with records of kinds of their own ("sample", "alert"), of which one step may have many.
"""

import errno
import heapq
import json
import logging
import math
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from esmeray.common.errors import DataError
from esmeray.common.publishing import atomic_file
from esmeray.run_folder.paths import RunFolder, sample_files

logger = logging.getLogger(__name__)

Record = dict[str, Any]
"""One line of metrics.jsonl, decoded."""


class MetricLabel(NamedTuple):
    """The words for a metric of a validation.

    Attributes:
        curve: in the picture of the curves.
        word: in a line of text; None for one that is drawn alone.
        definition: for a person who does not know the metric.
        is_loss: drawn with the losses.
        repeats: another metric that it equals where both are there, so that it is not drawn.
    """

    curve: str
    word: str | None = None
    definition: str | None = None
    is_loss: bool = False
    repeats: str | None = None


MetricLabels = Mapping[str, MetricLabel]
"""The words by the metric's name in metrics.jsonl."""

_TIMED = ("sample", "alert")
"""Kinds of records that are distinguished by their time, not by their step."""

HEAD_BYTES = 1 << 16
"""Bytes of a long file's beginning, which has the number of steps."""
_CHECKSUM = b',"crc32":'
_LINE_BYTES = 1 << 16
"""More than any line has."""

# Not CLOCK_MONOTONIC, which stands still while the machine sleeps: all later records would be too early.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BEGAN_S = time.time() - time.clock_gettime(_CLOCK)


def steady_time() -> float:
    """The time of day for records: Unix seconds when the process began, and what has passed since.

    Durations, order and the time left are made of these times: no step of the system's clock, by NTP or by hand,
    changes them within a process.
    """
    return _BEGAN_S + time.clock_gettime(_CLOCK)


def encode_record(record: Mapping[str, Any]) -> bytes:
    """One line of valid JSON, newline included. Non-finite numbers become null and set ``nonfinite``.

    Its last value is a checksum of what stands before it.
    """
    try:
        text = _json(record)
    except ValueError:  # a NaN or an infinity somewhere, which nearly no record has
        # Python's JSON has them as constants, each of which is read back as null, at any depth.
        finite = json.loads(json.dumps(record), parse_constant=lambda _: None)
        text = _json({**finite, "nonfinite": True})
    content = text.encode()[:-1]
    return content + b"%s%d}\n" % (_CHECKSUM, zlib.crc32(content))


def _json(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":"))


def decode_record(line: bytes) -> Record:
    """The record of a line. Raises ValueError where it is none."""
    content, _, checksum = line.rpartition(_CHECKSUM)
    # Before the JSON: a flipped bit may still be JSON, of another number.
    if checksum != b"%d}\n" % zlib.crc32(content):
        raise ValueError("damaged: its checksum does not hold")
    record = json.loads(content + b"}")
    if not (isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("step"), int)):
        raise ValueError("not an object with kind and step")
    if record["kind"] in _TIMED and not isinstance(record.get("time"), int | float):
        raise ValueError("no time")
    return record


def read_metrics(path: Path | str) -> list[Record]:
    """All records of the file, in order. A partial last line, left by a killed writer, is passed over.

    Raises DataError where a line before the last is not a record, or the file can't be read.
    """
    return [record for _, record in _lines_with_records(Path(path))]


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Appends records to metrics.jsonl, each by a single write: a killed writer leaves one partial line at most.

    Opening an existing file drops such a partial line. The file is made, with its folder, if absent. One writer at a
    time.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)
        self._drop_partial_line()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record. ``time`` is added where it is missing."""
        line = encode_record({**record, "time": record.get("time", steady_time())})
        if self._file.write(line) != len(line):  # the system reports a disk that is nearly full in no other way
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def write(self, kind: str, step: int, **values: Any) -> None:
        self.append({"kind": kind, "step": step, **values})

    def event(self, name: str, step: int, **details: Any) -> None:
        self.write("event", step, event=name, **details)

    def rewind(self, step: int) -> int:
        """Drop the records after ``step``, which the resumed run writes anew. Returns how many were dropped."""
        # Read twice rather than kept: the lines of a long run are many.
        dropped = sum(record["step"] > step for _, record in _lines_with_records(self.path))
        if dropped:
            self._replace(line for line, record in _lines_with_records(self.path) if record["step"] <= step)
        return dropped

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop_partial_line(self) -> None:
        with self.path.open("rb") as file:  # a file of samples may have grown for weeks: its last byte suffices
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            last = file.read()
        if last not in (b"", b"\n"):
            self._replace(_whole_lines(self.path))

    def _replace(self, lines: Iterable[bytes]) -> None:
        """Put ``lines`` in the file's place by rename: a reader sees the old file or the new one, never a mixture."""
        with atomic_file(self.path) as temporary, temporary.open("wb") as file:
            file.writelines(lines)
        self._file.close()  # it is of the file that was replaced, which nobody reads any more
        self._file = self.path.open("ab", buffering=0)


def _lines_with_records(path: Path) -> Iterator[tuple[bytes, Record]]:
    """The file's whole lines and what they hold. Raises as :func:`read_metrics` does."""
    try:
        for number, line in enumerate(_whole_lines(path), start=1):
            try:
                yield line, decode_record(line)
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number}: not a metrics record ({error}); remove the line, or move the file away"
                ) from error
    except OSError as error:
        raise DataError(f"{path}: can't read the metrics: {error.strerror}") from error


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


class RecordTail:
    """Follows a file of records, which may appear later, be replaced by a resumed run, or be out of reach for a while.

    ``skip_present`` leaves out what the file has already. Of a file longer than ``recent_bytes`` only its beginning and
    this much of its end are read.

    Attributes:
        problem: the last damaged line in words.
        failure: why the file could not be read the last time; empty while it can, or is not there.
    """

    def __init__(self, path: Path, *, skip_present: bool = False, recent_bytes: int | None = None) -> None:
        self.path = path
        self.problem = self.failure = ""
        self._recent_bytes = _LINE_BYTES if skip_present else recent_bytes
        self._inode: int | None = None
        self._offset = 0  # always at the start of a line
        self._last_s = self._given_until_s = -math.inf
        if skip_present:
            deque(self.poll(), maxlen=0)  # read, not skipped: its last record says what is new
            self._recent_bytes = recent_bytes
            self.problem = self.failure = ""

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
        # Another file, or a new one with the inode of a removed file. If the new one is longer, reading would continue
        # in the middle of a line: writers replace a followed file by rename.
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset, self._given_until_s = status.st_ino, 0, self._last_s
            if self._recent_bytes is not None and status.st_size > self._recent_bytes + HEAD_BYTES:
                yield from file.read(HEAD_BYTES).splitlines(keepends=True)[:-1]
                file.seek(status.st_size - self._recent_bytes)
                file.readline()  # most likely not whole
                self._offset = file.tell()
        file.seek(self._offset)
        # Not to the end of the file: sinks write alerts while they read, and a follower would never come to an end.
        while self._offset < status.st_size and (line := file.readline()).endswith(b"\n"):
            self._offset += len(line)
            yield line


class RunTail:
    """Follows the metrics, samples and alerts of a run.

    ``live`` gives only what is written from now on. ``warn`` is called with one line where a file can't be read, once
    for each cause.
    """

    def __init__(self, run: RunFolder, live: bool = False, warn: Callable[[str], None] = logger.warning) -> None:
        self._run = run
        self._warn = warn
        self._warned: set[str] = set()
        self._tails = {
            path: RecordTail(path, skip_present=live)
            for path in [run.metrics, run.alerts, *sample_files(run.monitoring)]
        }

    def poll(self) -> Iterator[Record]:
        """Yield what is new since the last call by time, that of one file in the file's order.

        The files are read as records are taken; those that are not taken are lost.
        """
        for path in sample_files(self._run.monitoring):
            self._tails.setdefault(path, RecordTail(path))
        # One record of each file at a time: a history of weeks takes no memory.
        return heapq.merge(*map(self._new_records, self._tails.values()), key=lambda record: record.get("time") or 0.0)

    def _new_records(self, tail: RecordTail) -> Iterator[Record]:
        yield from tail.poll()
        for message in filter(None, (tail.problem, tail.failure)):
            if message not in self._warned:
                self._warned.add(message)
                self._warn(message)
