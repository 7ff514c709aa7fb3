"""uvicorn's HTTP protocol in Serve's proxy, with limits on the bytes and seconds until a head is complete.

httptools (0.9) has no limit: it appends each piece of a header to the pieces before, in quadratic time. docs/service.md
compares it with h11, which has one.
"""

import asyncio
import uuid

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from esmeray.service.http.door import LARGE_HEAD, MOST_HEAD_BYTES

HEAD_S = 20.0
"""Seconds until the first head is complete. Later heads have uvicorn's keep-alive time, from the answer before."""
LINGER_S = 0.25
"""Seconds from a refusal until the connection is closed."""


class LimitedProtocol(HttpToolsProtocol):
    """A connection; see the module."""

    pending_bytes = 0
    """Bytes since the last complete head or piece of a body: headers, trailers, extensions of chunks, empty lines."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        self.pending_bytes += len(data)
        super().data_received(data)
        if self.pending_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            answer = LARGE_HEAD.response({"path": "", "method": ""}, uuid.uuid4().hex, {"connection": "close"})
            lines = [name + b": " + value for name, value in answer.raw_headers]
            self.transport.write(STATUS_LINE[answer.status_code] + b"\r\n".join([*lines, b"", answer.body]))
            # What still arrives is discarded. A connection that is closed with unread bytes is reset, and the client
            # loses the answer.
            self.connection_lost(ConnectionAbortedError("refused"))
            self.transport.set_protocol(asyncio.Protocol())
            self.loop.call_later(LINGER_S, self.transport.close)

    def on_headers_complete(self) -> None:
        self.pending_bytes = 0
        self._unset_keepalive_if_required()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.pending_bytes = 0
        super().on_body(body)

    def _unset_keepalive_if_required(self) -> None:
        # uvicorn ends this timeout at the first byte, after which a head may take for ever.
        if not self.pending_bytes:
            super()._unset_keepalive_if_required()
