"""uvicorn's HTTP protocol in Serve's proxy, with limits on what a connection may send before the application reads it.

httptools (0.9) has no limit: it appends each piece of a header to the pieces before, in quadratic time. docs/service.md
compares it with h11, which has one.
"""

import asyncio
import uuid

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from esmeray.service.http.door import LARGE_HEAD, LINGER_S, MOST_HEAD_BYTES
from esmeray.service.http.refusals import RefusalError

HEAD_S = 20.0
"""Seconds until the first head is complete. Later heads have uvicorn's keep-alive time, from the answer before."""
PARSED_BYTES = 8192
"""Bytes parsed at a time. A request that waits for the answer to the one before ends the parsing."""
FREE_CHUNKS, MEAN_CHUNK_BYTES = 1000, 32
"""A body's chunks have that many bytes on average, apart from the free ones. Each chunk costs the proxy 1 µs."""
MALFORMED = RefusalError(400, "this is not HTTP/1.1")
SMALL_CHUNKS = RefusalError(400, f"the body's chunks have fewer than {MEAN_CHUNK_BYTES} bytes on average; send larger")


class LimitedProtocol(HttpToolsProtocol):
    """A connection; see the module."""

    unparsed = memoryview(b"")
    pending_bytes = 0
    """Bytes since the last complete head or piece of a body: headers, trailers, extensions of chunks, empty lines."""
    missing_bytes = 0
    """Bytes by which the chunks of the arriving body are smaller than they should be on average."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        self.unparsed = memoryview(b"".join((self.unparsed, data)))
        self._parse()

    def _parse(self) -> None:
        """Parse what has arrived, up to a request that waits for the answer to the one before."""
        # 256 kB may hold 9,000 requests. Parsed at once, they would block the proxy for 0.1 s, and all be kept.
        while self.unparsed and self._may_parse():
            piece = self.unparsed[:PARSED_BYTES]
            self.unparsed = self.unparsed[PARSED_BYTES:]
            self.pending_bytes += len(piece)
            super().data_received(piece)  # type: ignore[arg-type]
            if self.pending_bytes > MOST_HEAD_BYTES:
                self._refuse(LARGE_HEAD)
            elif self.missing_bytes > FREE_CHUNKS * MEAN_CHUNK_BYTES:
                self._refuse(SMALL_CHUNKS)
        if self.unparsed:
            self.transport.pause_reading()
            self.flow.read_paused = False  # otherwise uvicorn resumes whenever the application waits for a message
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _may_parse(self) -> bool:
        cycle = self.cycle
        is_answering = bool(self.pipeline) or not (cycle is None or cycle.more_body or cycle.response_complete)
        # A refusal and an upgrade give the transport another protocol.
        return not (is_answering or self.transport.is_closing()) and self.transport.get_protocol() is self

    def _refuse(self, refusal: RefusalError) -> None:
        answer = refusal.response({"path": "", "method": ""}, uuid.uuid4().hex, {"connection": "close"})
        lines = [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(STATUS_LINE[answer.status_code] + b"\r\n".join([*lines, b"", answer.body]))
        # What still arrives is discarded. A connection that is closed with unread bytes is reset, and the client
        # loses the answer.
        self.connection_lost(ConnectionAbortedError("refused"))
        self.unparsed = memoryview(b"")
        self.pending_bytes = self.missing_bytes = 0
        self.pipeline.clear()  # otherwise these requests are answered until the connection is closed
        self.flow.resume_reading()
        self.transport.set_protocol(asyncio.Protocol())
        self.loop.call_later(LINGER_S, self.transport.close)

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
        # uvicorn ends this timeout at the first byte, after which a head may take for ever.
        if not self.pending_bytes:
            super()._unset_keepalive_if_required()
