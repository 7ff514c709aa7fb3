"""metrics.jsonl: what a run measured, one JSON object a line; its writer, its reader and a reader that follows it.

Training rank 0 writes it, everything else (progress line, W&B, curves) reads it, so that none of them can disturb a
step. A record has a ``kind`` ("train", "validation" or "event"), a ``step`` and a ``time`` (Unix seconds); what else it
has is for those who write and show it. NaN and infinities, which JSON lacks, become null, and the record then carries
``"nonfinite": true``. The files of samples and alerts are of the same make, with records of kinds of their own
("sample", "alert"), of which one step may have many.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from common.errors import DataError
from common.publishing import atomic_file

Record = dict[str, Any]
"""One line of metrics.jsonl, decoded."""
CHUNK_BYTES = 1 << 18
"""Of a followed file, what is read at once: all workers' samples of weeks are larger than memory."""
MANY_A_STEP = frozenset({"sample", "alert"})
"""Kinds of records that are told apart by their time, not by their step."""


def encode_record(record: Mapping[str, Any]) -> bytes:
    """One line of valid JSON, newline included. Non-finite numbers become null and set ``nonfinite``."""
    finite, all_finite = _without_nonfinite(record)
    if not all_finite:
        finite["nonfinite"] = True
    return json.dumps(finite, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def read_metrics(path: Path | str) -> list[Record]:
    """All records of the file, in order. A partial last line, left by a killed writer, is passed over.

    Raises:
        DataError: a line before the last is not a JSON object, or the file can't be read.
    """
    return [record for _, record in _lines_with_records(Path(path))]


class MetricsLog:
    """Appends records to metrics.jsonl, each by a single write: a killed writer leaves one partial line at most.

    Opening an existing file drops such a partial line. One writer at a time.

    Args:
        path: the file; made, with its folder, if absent.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._open()
        self._drop_partial_line()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record. ``time`` is added where it is missing."""
        line = encode_record({**record, "time": record.get("time", time.time())})
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def rewind(self, step: int) -> int:
        """Drop the records after ``step``, which the resumed run writes anew. Returns how many were dropped."""
        dropped = sum(record["step"] > step for _, record in _lines_with_records(self.path))
        if dropped:
            self._replace(line for line, record in _lines_with_records(self.path) if record["step"] <= step)
        return dropped

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _drop_partial_line(self) -> None:
        with self.path.open("rb") as file:  # a file of samples may have grown for weeks: its last byte tells
            if not file.seek(0, os.SEEK_END):
                return
            file.seek(-1, os.SEEK_END)
            if file.read() == b"\n":
                return
        self._replace(_whole_lines(self.path))

    def _replace(self, lines: Iterable[bytes]) -> None:
        """Put ``lines`` in the file's place by rename: a reader sees the old file or the new one, never a mixture."""
        with atomic_file(self.path) as temporary, temporary.open("wb") as file:
            file.writelines(lines)
        os.close(self._descriptor)
        self._descriptor = self._open()


class MetricsTail:
    """Follows metrics.jsonl while it is written: it may appear late, end in a partial line and be replaced by a rewind.

    Args:
        path: the file to follow.
        live: False: everything from the file's beginning, each (kind, step) once, also where a resumed run repeats
            steps. True: repeated steps included, as a person watching wants it. Samples and alerts are never repeats.
        history: whether what is in the file already is given. Default: unless ``live``.
    """

    def __init__(self, path: Path | str, live: bool = False, history: bool | None = None) -> None:
        self._path = Path(path)
        self._live = live
        self._inode: int | None = None
        self._offset = 0  # bytes of the file, always at the start of a line
        self._seen: set[Hashable] = set()
        self._last_s = self._given_until_s = -math.inf  # times of samples and alerts
        if not (history if history is not None else not live):
            self._pass_over_history()

    def poll(self) -> Iterator[Record]:
        """The records that are new since the last call, in the file's order; none while the file is absent.

        The file is read in chunks as they are taken, up to where it ends when the first is. Those that are not taken
        are new to the next call.

        Raises:
            DataError: the next line is damaged; the call after this one goes on behind it.
            OSError: the file can't be read.
        """
        for line in self._new_lines():
            self._offset += len(line)
            record = _decode_line(line, self._path, None)
            if self._is_new(record, line):
                yield record

    def _new_lines(self) -> Iterator[bytes]:
        """Whole lines; the caller moves the offset past each."""
        end: int | None = None  # of the file, as it was at the first chunk
        while True:
            try:
                file = self._path.open("rb")
            except FileNotFoundError:
                return
            with file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset = status.st_ino, 0
                    self._given_until_s = self._last_s
                    end = None
                end = status.st_size if end is None else end
                file.seek(self._offset)
                lines = _chunk(file, end - self._offset)
            if not lines:
                return
            yield from lines

    def _pass_over_history(self) -> None:
        while True:
            try:
                for _ in self.poll():
                    pass
            except DataError:
                continue  # history too
            return

    def _is_new(self, record: Record, line: bytes) -> bool:
        if record["kind"] in MANY_A_STEP:
            # Only a file that was replaced holds again what was given before. A set of all would grow for weeks.
            is_new = record["time"] > self._given_until_s
            self._last_s = max(self._last_s, record["time"])
            return is_new
        # A line that survived a rewind is the same to the byte (its time stamp included); a repeated step is not.
        identity = hash(line) if self._live else (record["kind"], record["step"], record.get("event"))
        if identity in self._seen:
            return False
        self._seen.add(identity)
        return True


def _chunk(file: BinaryIO, most_bytes: int) -> list[bytes]:
    """The whole lines among the next :data:`CHUNK_BYTES`, at least one if there is one; none beyond ``most_bytes``."""
    data = b""
    while b"\n" not in data and (more := file.read(min(CHUNK_BYTES, most_bytes - len(data)))):
        data += more
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


def _lines_with_records(path: Path) -> Iterator[tuple[bytes, Record]]:
    """The file's whole lines and what they hold. Raises as :func:`read_metrics` does."""
    try:
        for number, line in enumerate(_whole_lines(path), start=1):
            yield line, _decode_line(line, path, number)
    except OSError as error:
        raise DataError(f"{path}: can't read the metrics: {error.strerror}") from error


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Without what follows the last newline, which is empty or partial."""
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _decode_line(line: bytes, path: Path, number: int | None) -> Record:
    try:
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("kind"), str) and "step" in record:
            if record["kind"] not in MANY_A_STEP or isinstance(record.get("time"), int | float):
                return record
            reason = "no time"
        else:
            reason = "not an object with kind and step"
    except ValueError as error:
        reason = str(error)
    where = f"{path}, line {number}" if number else f"{path}: {line[:60]!r}"
    raise DataError(f"{where}: not a metrics record ({reason}); remove the line, or move the file away")


def _without_nonfinite(value: Any) -> tuple[Any, bool]:
    """``value`` with null for each NaN or infinity at any depth, and whether there was none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None, False
    if isinstance(value, Mapping):
        pairs = {key: _without_nonfinite(item) for key, item in value.items()}
        return {key: item for key, (item, _) in pairs.items()}, all(finite for _, finite in pairs.values())
    if isinstance(value, list | tuple):
        items = [_without_nonfinite(item) for item in value]
        return [item for item, _ in items], all(finite for _, finite in items)
    return value, True
