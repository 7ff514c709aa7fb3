"""metrics.jsonl: the measurements of a run, one JSON object per line. Writer, reader, and followers of a run.

Rank 0 of training writes it; the progress line, W&B and the curves read it. A record has a ``kind`` ("train",
"validation" or "event"), a ``step`` and a ``time`` (Unix seconds). NaN and infinities, which JSON lacks, become null,
and the record then contains ``"nonfinite": true``. A line ends in its ``crc32``. Files of samples and alerts have the
same format, with their own kinds ("sample", "alert"); a step may have many of these.
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
from esmeray.common.publishing import atomic_file, named_errors
from esmeray.run_folder.paths import RunFolder, sample_files

logger = logging.getLogger(__name__)

Record = dict[str, Any]
"""One line of metrics.jsonl, decoded."""


class MetricLabel(NamedTuple):
    """Labels of a validation metric.

    Attributes:
        curve: label in the plot of the curves.
        word: label in a line of text; None for a metric that is only plotted.
        definition: explanation for readers who don't know the metric.
        is_loss: plotted together with the losses.
        repeats: another metric that it equals if both exist; then this one is not plotted.
    """

    curve: str
    word: str | None = None
    definition: str | None = None
    is_loss: bool = False
    repeats: str | None = None


MetricLabels = Mapping[str, MetricLabel]
"""Labels by the metric's name in metrics.jsonl."""

HEAD_BYTES = 1 << 16
"""Bytes to read from the beginning of a long file, which contains the number of steps."""
_CHECKSUM = b',"crc32":'
_LINE_BYTES = 1 << 16
"""Upper bound on the bytes of a line."""

# Not CLOCK_MONOTONIC, which stops while the machine sleeps: all later records would be too early.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BEGAN_S = time.time() - time.clock_gettime(_CLOCK)


def steady_time() -> float:
    """Return the time for records: Unix seconds at the start of the process plus the time elapsed since.

    Durations, order and remaining time are computed from it. Clock adjustments, by NTP or by hand, don't change it
    within a process.
    """
    return _BEGAN_S + time.clock_gettime(_CLOCK)


def encode_record(record: Mapping[str, Any]) -> bytes:
    """Encode a record as one line of valid JSON with a newline. Non-finite numbers become null and set ``nonfinite``.

    Its last value is a checksum of the preceding bytes.
    """
    try:
        text = _json(record)
    except ValueError:  # the record contains a NaN or an infinity, which is rare
        # Python's JSON writes them as constants, which are read back as null, at any depth.
        finite = json.loads(json.dumps(record), parse_constant=lambda _: None)
        text = _json({**finite, "nonfinite": True})
    content = text.encode()[:-1]
    return content + b"%s%d}\n" % (_CHECKSUM, zlib.crc32(content))


def _json(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":"))


def decode_record(line: bytes) -> Record:
    """Decode a line to a record. Raises ValueError if it is not a valid record."""
    content, _, checksum = line.rpartition(_CHECKSUM)
    # Check before parsing: JSON with a flipped bit may still be valid, with another number.
    if checksum != b"%d}\n" % zlib.crc32(content):
        raise ValueError("damaged: checksum mismatch")
    return json.loads(content + b"}")


def read_metrics(path: Path | str) -> list[Record]:
    """Read all records of the file, in order. A partial last line, left by a killed writer, is skipped.

    Raises DataError if a line before the last is not a record, or the file can't be read.
    """
    return [record for _, record in _lines_with_records(Path(path))]


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Append records to metrics.jsonl, each with a single write: a killed writer leaves at most one partial line.

    Opening an existing file drops a partial line. A missing file is created, with its folder. Only one writer at a
    time.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)
        self._drop_partial_line()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record. ``time`` is added if it is missing."""
        line = encode_record({**record, "time": record.get("time", steady_time())})
        with named_errors(self.path):
            if self._file.write(line) != len(line):  # a short write is the only sign of a nearly full disk
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, kind: str, step: int, **values: Any) -> None:
        self.append({"kind": kind, "step": step, **values})

    def event(self, name: str, step: int, **details: Any) -> None:
        self.write("event", step, event=name, **details)

    def rewind(self, step: int) -> int:
        """Drop the records after ``step``, which a resumed run writes again. Returns the number of dropped records."""
        # Read the file twice instead of keeping it in memory: a long run has many lines.
        dropped = sum(record["step"] > step for _, record in _lines_with_records(self.path))
        if dropped:
            self._replace(line for line, record in _lines_with_records(self.path) if record["step"] <= step)
        return dropped

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop_partial_line(self) -> None:
        with self.path.open("rb") as file:  # files of samples may have grown for weeks: read only the last byte
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            last = file.read()
        if last not in (b"", b"\n"):
            self._replace(_whole_lines(self.path))

    def _replace(self, lines: Iterable[bytes]) -> None:
        """Replace the file by ``lines`` with a rename: readers see the old file or the new one, never a mixture."""
        with atomic_file(self.path) as temporary, temporary.open("wb") as file:
            file.writelines(lines)
        self._file.close()  # it refers to the replaced file, which has no reader any more
        self._file = self.path.open("ab", buffering=0)


def _lines_with_records(path: Path) -> Iterator[tuple[bytes, Record]]:
    """Yield the file's complete lines and their records. Raises as :func:`read_metrics`."""
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
    """Follow a file of records that may appear later, be replaced by a resumed run, or be temporarily unreachable.

    ``skip_present``: leave out records that are already in the file. ``recent_bytes``: if the file is longer, read only
    its beginning and this many bytes at its end.

    Attributes:
        problem: message about the last damaged line.
        failure: reason why the file could not be read the last time; empty if it could, or does not exist.
    """

    def __init__(self, path: Path, *, skip_present: bool = False, recent_bytes: int | None = None) -> None:
        self.path = path
        self.problem = self.failure = ""
        self._recent_bytes = _LINE_BYTES if skip_present else recent_bytes
        self._inode: int | None = None
        self._offset = 0  # always at the start of a line
        self._last_s = self._given_until_s = -math.inf
        if skip_present:
            deque(self.poll(), maxlen=0)  # read, not skipped: the time of its last record tells new from old
            self._recent_bytes = recent_bytes
            self.problem = self.failure = ""

    def poll(self) -> Iterator[Record]:
        """Yield the records that are new since the last call, in file order. A partial last line waits.

        The file is read as records are consumed, up to its end at the time of the call. In a replaced file, records are
        new if their time is later than all times before, since a resumed run repeats steps.
        """
        self.failure = ""
        try:
            with self.path.open("rb") as file:
                for line in self._new_lines(file):
                    try:
                        record = decode_record(line)
                    except ValueError as error:
                        self.problem = f"{self.path}: skipped {line[:60]!r}: {error}"
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
                file.readline()  # most likely a partial line
                self._offset = file.tell()
        file.seek(self._offset)
        # Stop at the size at the start: sinks write alerts while they read, and a follower would never reach the end.
        while self._offset < status.st_size and (line := file.readline()).endswith(b"\n"):
            self._offset += len(line)
            yield line


class RunTail:
    """Follow the metrics, samples and alerts of a run.

    ``live``: yield only records that are written from now on. ``warn`` is called with a message if a file can't be
    read, once per cause.
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
        """Yield new records since the last call by time; the records of one file stay in file order.

        Files are read as records are consumed. Records that are not consumed are lost.
        """
        for path in sample_files(self._run.monitoring):
            self._tails.setdefault(path, RecordTail(path))
        # One record of each file at a time, so that a history of weeks takes no memory.
        return heapq.merge(*map(self._new_records, self._tails.values()), key=lambda record: record.get("time") or 0.0)

    def _new_records(self, tail: RecordTail) -> Iterator[Record]:
        yield from tail.poll()
        for message in filter(None, (tail.problem, tail.failure)):
            if message not in self._warned:
                self._warned.add(message)
                self._warn(message)
