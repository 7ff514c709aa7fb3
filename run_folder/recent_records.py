"""Follows a file of records for somebody who looks at it: its beginning, its recent part, and what comes.

In: a path, perhaps on a remote file system. Out: records. Unlike :class:`run_folder.metrics_log.MetricsTail` it misses
the middle of a long file, so that looking costs the same at every length, and it stops at nothing: a line that can't be
read is counted and passed over, a file that is gone or can't be opened is as one that is not there yet.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import BinaryIO

from run_folder.metrics_log import Record

HEAD_BYTES = 1 << 16
"""Of a long file's beginning, which tells how many steps there will be."""
RECENT_BYTES = 4 << 20


class RecentRecords:
    """One file.

    Args:
        path: of it; may appear later.
        recent_bytes: of a file that is there already, how much of its end is read.

    Attributes:
        damaged: lines that could not be read.
        failure: why the file could not be opened the last time, in words; empty while it can, or is not there.
        restarts: times that the file was replaced by another (a resumed run rewinds it); what it gave before is void.
    """

    def __init__(self, path: Path | str, recent_bytes: int = RECENT_BYTES) -> None:
        self.path = Path(path)
        self.damaged = 0
        self.failure = ""
        self.restarts = 0
        self._recent_bytes = recent_bytes
        self._inode: int | None = None
        self._offset = 0  # always at the start of a line

    def poll(self) -> list[Record]:
        """The records that are new since the last call, in the file's order. A partial last line waits."""
        self.failure = ""
        try:
            with self.path.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            return []
        except OSError as error:  # a remote folder that is away for a while
            self.failure = f"{self.path.name}: {error.strerror}"
            return []

    def _read(self, file: BinaryIO) -> list[Record]:
        status = os.fstat(file.fileno())
        records: list[Record] = []
        if status.st_ino != self._inode or status.st_size < self._offset:
            self.restarts += self._inode is not None
            self._inode, self._offset = status.st_ino, 0
            if status.st_size > self._recent_bytes + HEAD_BYTES:
                records += self._decoded(file.read(HEAD_BYTES))
                file.seek(status.st_size - self._recent_bytes)
                file.readline()  # most likely not whole
                self._offset = file.tell()
        file.seek(self._offset)
        data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return records + self._decoded(complete)

    def _decoded(self, data: bytes) -> list[Record]:
        records = []
        for line in data[: data.rfind(b"\n") + 1].splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("step"), int):
                records.append(record)
            else:
                self.damaged += 1
        return records
