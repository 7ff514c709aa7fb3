"""A file's text, read and decompressed by a thread of its own, a chunk ahead of whoever parses it.

Reading, hashing and decompressing let go of Python's global lock: beside a parser, on two cores, they cost next to
nothing.
"""

import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash
from xopen import xopen

from esmeray.common.background_thread import BackgroundThread
from esmeray.common.errors import DataError
from esmeray.dataset.fasta.counts import SourceFile
from esmeray.dataset.fasta.locate import DECOMPRESSION_ERRORS, damage

CHUNK_BYTES = 384 * 1024
"""A little more than a batch of :mod:`esmeray.dataset.fasta.reader`, which needs no cutting then."""

_RAW_CHUNK_BYTES = 256 * 1024


class ReadAhead:
    """One file from start to end, once. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.bytes_read = 0  # of the file on disk, that went into the chunks taken so far
        self._path = path
        # Two: one that is being parsed while the other is filled.
        self._buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(2)]

    def __enter__(self) -> Self:
        """Open the file and start reading. Raises OSError where it can't be read."""
        with ExitStack() as opened:
            file = opened.enter_context(self._path.open("rb", buffering=0))
            self._status = os.fstat(file.fileno())
            self._raw = _HashedFile(file)
            # threads=0: xopen decompresses in this process, where a truncated file is an error.
            buffered = io.BufferedReader(self._raw, _RAW_CHUNK_BYTES)
            self._decompressed = opened.enter_context(xopen(buffered, "rb", threads=0))
            self._thread = opened.enter_context(closing(BackgroundThread[tuple[memoryview, int]]()))
            self._held = opened.pop_all()
        self._begin()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._held.close()

    def __iter__(self) -> Iterator[memoryview]:
        while chunk := self.take():
            yield chunk

    def take(self) -> memoryview:
        """The next chunk, empty at the end; valid until the next call.

        Raises OSError where the file can't be read, DataError where its compression is damaged.
        """
        try:
            text, self.bytes_read = self._thread.wait()
        except DECOMPRESSION_ERRORS as error:
            if getattr(error, "errno", None) is not None:
                raise  # the system's own refusal, not a decompressor's
            raise DataError(damage(self._path, error)) from error
        if text:
            self._begin()
        return text

    def source_file(self) -> SourceFile:
        """The file as it was read; ask after its end."""
        return SourceFile(
            path=str(self._path.resolve()),
            bytes=self._status.st_size,
            mtime_ns=self._status.st_mtime_ns,
            xxh128=self._raw.checksum.hexdigest(),
        )

    def _begin(self) -> None:
        self._buffers.reverse()
        self._thread.begin(partial(self._fill, self._buffers[0]))

    def _fill(self, buffer: memoryview) -> tuple[memoryview, int]:
        size = 0
        while size < len(buffer) and (count := self._decompressed.readinto(buffer[size:])):  # type: ignore[attr-defined]
            size += count
        if not size:  # what stands after the end of the compressed data belongs to the checksum
            while self._raw.read(_RAW_CHUNK_BYTES):
                pass
        return buffer[:size], self._raw.num_bytes


class TextStream(io.RawIOBase):
    """The rest of a file's text as a file: text that was taken and not used, then the chunks."""

    def __init__(self, text: ReadAhead, unused: bytes = b"") -> None:
        self._text = text
        self._waiting = memoryview(unused)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        chunk = self._waiting or self._text.take()
        size = min(len(chunk), len(buffer))
        buffer[:size], self._waiting = chunk[:size], chunk[size:]
        return size


class _HashedFile(io.RawIOBase):
    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.name = str(file.name)
        self.num_bytes = 0
        self.checksum = xxhash.xxh3_128()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        num_bytes = self._file.readinto(buffer) or 0
        self.checksum.update(memoryview(buffer)[:num_bytes])
        self.num_bytes += num_bytes
        return num_bytes
