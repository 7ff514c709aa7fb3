"""uvicorn's HTTP protocol for Serve's proxy, with limits on what a connection may send before the application reads it.

httptools 0.9 has no limits: it appends each piece of a header to the earlier pieces, in quadratic time. docs/service.md
compares it with h11, which has a limit.
"""

import asyncio
import uuid

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from esmeray.service.http.door import LARGE_HEAD, MAX_HEAD_BYTES
from esmeray.service.http.refusals import RefusalError

HEAD_S = 20.0
"""Seconds until the first head must be complete. Later heads have uvicorn's keep-alive time after the last answer."""
PARSED_BYTES = 8192
"""Bytes parsed at a time. Parsing stops while a request waits for the answer to an earlier one."""
FREE_CHUNKS, MEAN_CHUNK_BYTES = 1000, 32
"""Minimum size of a body's chunks on average; the first FREE_CHUNKS may be empty. Each chunk costs the proxy 1 µs."""
DISCARDING_S, PAUSE_S = 1.0, 0.001
"""Seconds that a refused connection is read, and between two reads. Reading 122 MB faster would delay others."""
MALFORMED = RefusalError(400, "this is not HTTP/1.1")
SMALL_CHUNKS = RefusalError(400, f"the body's chunks have fewer than {MEAN_CHUNK_BYTES} bytes on average; send larger")


class LimitedProtocol(HttpToolsProtocol):
    """Protocol of a connection; see the module."""

    unparsed = memoryview(b"")
    pending_bytes = 0
    """Bytes since the last complete head or piece of a body: headers, trailers, chunk extensions, empty lines."""
    missing_bytes = 0
    """Bytes that the chunks of the arriving body lack to have MEAN_CHUNK_BYTES on average."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        self.unparsed = memoryview(b"".join((self.unparsed, data)))
        self._parse()

    def _parse(self) -> None:
        """Parse the received bytes, up to a request that waits for the answer to an earlier one."""
        # 256 kB may hold 9,000 requests. Parsing them at once would block the proxy for 0.1 s and keep them in memory.
        while self.unparsed and self._may_parse():
            piece = self.unparsed[:PARSED_BYTES]
            self.unparsed = self.unparsed[PARSED_BYTES:]
            self.pending_bytes += len(piece)
            super().data_received(piece)  # type: ignore[arg-type]
            if self.pending_bytes > MAX_HEAD_BYTES:
                self._refuse(LARGE_HEAD)
            elif self.missing_bytes > FREE_CHUNKS * MEAN_CHUNK_BYTES:
                self._refuse(SMALL_CHUNKS)
        if self.unparsed:
            self.transport.pause_reading()
            self.flow.read_paused = False  # otherwise uvicorn resumes when the application waits for a message
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _may_parse(self) -> bool:
        cycle = self.cycle
        is_answering = bool(self.pipeline) or not (cycle is None or cycle.more_body or cycle.response_complete)
        # After a refusal or an upgrade the transport has another protocol.
        return not (is_answering or self.transport.is_closing()) and self.transport.get_protocol() is self

    def _refuse(self, refusal: RefusalError) -> None:
        answer = refusal.response({"path": "", "method": ""}, uuid.uuid4().hex, {"connection": "close"})
        lines = [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(STATUS_LINE[answer.status_code] + b"\r\n".join([*lines, b"", answer.body]))
        # Discard what still arrives. Closing a connection with unread bytes resets it, and the client loses the answer.
        self.connection_lost(ConnectionAbortedError("refused"))
        self.unparsed = memoryview(b"")
        self.pending_bytes = self.missing_bytes = 0
        self.pipeline.clear()  # otherwise these requests would still be answered
        self.flow.resume_reading()
        self.transport.set_protocol(_Discarding(self.transport, self.loop))
        self.loop.call_later(DISCARDING_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        self._refuse(MALFORMED)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._parse()

    def on_headers_complete(self) -> None:
        self.pending_bytes = 0
        self.missing_bytes = 0
        self._unset_keepalive_if_required()
        self.scope["state"]["is_first"] = self.cycle is None
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self.missing_bytes += MEAN_CHUNK_BYTES

    def on_body(self, body: bytes) -> None:
        self.pending_bytes = 0
        self.missing_bytes -= len(body)
        super().on_body(body)

    def _unset_keepalive_if_required(self) -> None:
        # uvicorn ends this timeout at the first byte of a head, which could then take forever.
        if not self.pending_bytes:
            super()._unset_keepalive_if_required()


class _Discarding(asyncio.Protocol):
    """Protocol of a refused connection: discards what arrives, at most 256 kB per PAUSE_S."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop

    def data_received(self, data: bytes) -> None:
        self._transport.pause_reading()
        self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
