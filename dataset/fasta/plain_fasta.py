"""FASTA laid out plainly, a chunk of text at a time by the compiled kernel: the fast way past dnaio.

In: chunks of a file's text. Out: :class:`Records`, or the notice that the text is not plain, and then all of it that
was not given out yet. Plain is ASCII without control characters but for line feeds, without blank lines and comments,
without blanks in sequences. Of such text this gives what dnaio gives, record for record, and a test
holds it to that; anything else (CRLF, a byte order mark, blank lines, what isn't FASTA) is dnaio's.

dnaio's FASTA reader is a loop over lines in Python: 3.8 us for a record of 350 residues in lines of 60, where the
kernel (:mod:`dataset.fasta.kernel`) takes 0.17 us, hashes included (a shared core of an AMD EPYC 9004).
"""

from __future__ import annotations

import numpy as np

from dataset.fasta.kernel import Columns, Kernel
from dataset.fasta.records import Records

LONGEST_RECORD_BYTES = 64 << 20
"""A record that is longer is left to dnaio; no protein is a thousandth of it, so it may be no FASTA at all."""

_LINE_FEED, _HEADER = b"\n>"


class PlainFasta:
    """Takes a file's text in chunks of any size, gives its records.

    Whatever gives None leaves the text as it was, to be had from :meth:`unparsed`.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._size = 0
        self._buffer = bytearray()
        self._allocate(1 << 20)

    def feed(self, chunk: memoryview) -> Records | None:
        """Take a chunk, give the records that are complete with it; None when they are not plain."""
        searched = max(self._size - 1, 0)
        self._append(chunk)
        if self._text[0] != _HEADER:
            return None
        last_header = self._buffer.rfind(b"\n>", searched, self._size) + 1
        if last_header:
            return self._take(last_header)
        return Records.of([], []) if self._size < LONGEST_RECORD_BYTES else None

    def finish(self) -> Records | None:
        """The last record, once there is no more text; None when it is not plain, or there was none at all."""
        if not self._size or self._text[0] != _HEADER:
            return None
        size = self._size
        if self._text[size - 1] != _LINE_FEED:
            self._append(memoryview(b"\n"))
        records = self._take(self._size)
        if records is None:
            self._size = size
        return records

    def unparsed(self) -> bytes:
        """The text that was taken and not given out as records."""
        return bytes(self._buffer[: self._size])

    def _allocate(self, num_bytes: int) -> None:
        buffer = bytearray(num_bytes)
        buffer[: self._size] = self._buffer[: self._size]
        self._buffer = buffer
        self._text = np.frombuffer(buffer, dtype=np.uint8)
        self._columns = Columns(num_bytes)

    def _append(self, chunk: memoryview) -> None:
        end = self._size + len(chunk)
        if end > len(self._buffer):
            self._allocate(2 * end)
        self._buffer[self._size : end] = chunk
        self._size = end

    def _take(self, end: int) -> Records | None:
        """The records of the text before ``end``, which are complete; the text after it moves to the front."""
        records = self._kernel.parse(self._text[:end], self._columns)
        if records is not None:
            rest = self._size - end
            self._buffer[:rest] = self._buffer[end : self._size]
            self._size = rest
        return records
