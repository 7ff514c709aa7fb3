"""Middleware of Serve's proxy that refuses or delays requests before they cost a call of the ingress.

A call takes 2 to 4 ms of a core in the proxy, and as much in the ingress. An environment variable names this module to
Serve (``esmeray/service/launch.py``). A cluster that was started without the variable works without the middleware.
"""

import asyncio
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS

from esmeray.common.processor import give_back_memory
from esmeray.service.http.access import check_page
from esmeray.service.http.refusals import ROOM_TOKENS, RefusalError

FULL_S = 0.1
"""Seconds after a refusal for overload during which the proxy itself refuses larger requests."""
GATHERED_BYTES, GATHERED_S = 65_536, 30.0
"""Small pieces of a body are gathered until they have this size, or for this time."""
LARGE_BYTES = 1_000_000
LARGE_BYTES_PER_S = 25_000_000
"""Rate for all bodies together, for their bytes beyond LARGE_BYTES. Reading 16 MB costs the proxy and the ingress 0.1 s
of a core each, whatever the bytes are."""
LEAVES_S, WARY_S = 0.05, 1.0
"""After a client has left without its answer, for WARY_S the first request of each connection waits for LEAVES_S. A
client that leaves meanwhile costs the ingress nothing; one that keeps its connection does not wait."""
LINGER_S = 0.25
"""Seconds before a refused connection is closed, or a foreign page is answered, so that they come back less often."""
MAX_HEAD_BYTES = 65_536
LARGE_HEAD = RefusalError(431, f"address and headers have more than {MAX_HEAD_BYTES:,} bytes; send a body")
_FRAME_BYTES = 100
"""Bytes of a body in addition to its residues."""
_OF_SERVE = (b"x-request-timeout-seconds", b"x-request-disconnect-disabled")
"""Headers of Ray Serve, removed from requests. A caller could use them to get the proxy's own timeout answers, or to
keep a request computing after leaving."""


@dataclass(eq=False)
class Door:
    """ASGI middleware; see the module.

    Attributes:
        app: the proxy's own application.
        full_until_s: until then ``refusal`` is the answer to bodies of more than ``most_bytes``.
        turns: held by the one request that is passed on in a turn of the event loop.
        next_large_s: time at which the next piece of a large body may be passed on.
        wary_until_s: until then the first request of a connection waits; see LEAVES_S.
    """

    app: ASGIApp
    full_until_s: float = 0.0
    refusal: RefusalError | None = None
    most_bytes: int = 0
    turns: asyncio.Lock = field(default_factory=asyncio.Lock)
    next_large_s: float = 0.0
    wary_until_s: float = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # start-up and shutdown of the proxy
            await self.app(scope, receive, send)
            return
        if scope["path"].startswith("/-/"):  # routes and health, which the proxy would answer to everybody
            scope["path"] = f"/{scope['path']}"
        headers = dict(scope["headers"])
        body_bytes = headers.get(b"content-length", b"0")
        # A residue takes at least a byte, so the length tells before the body is read whether there is room.
        is_large = body_bytes.isdigit() and int(body_bytes) > self.most_bytes
        refusal = self.refusal if is_large and time.monotonic() < self.full_until_s else head_refusal(scope)
        try:
            check_page(headers.get(b"host", b"").decode("latin-1"), scope, headers)
        except RefusalError as foreign:
            refusal = foreign
            await asyncio.sleep(LINGER_S)
        if refusal is not None:
            request_id = uuid.uuid4().hex  # Serve adds ids only to requests that reach it
            await refusal.response(scope, request_id, {"x-request-id": request_id})(scope, receive, send)
            return
        scope["headers"] = [header for header in scope["headers"] if header[0] not in _OF_SERVE]

        is_answered = False

        async def noting(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            if message.get("status") == 429:
                self._note(dict(message["headers"]))
            await send(message)

        body = _Gathered(receive)
        first = await body()  # the ingress is called only once the first piece has arrived
        begun = iter([first])
        paid_bytes = LARGE_BYTES

        async def received() -> Message:
            nonlocal paid_bytes
            # Before the next piece is read, so that no piece is in memory while this waits.
            if body.size_bytes > paid_bytes and not body.is_whole:
                await self._wait_for_turn(body.size_bytes - paid_bytes)
                paid_bytes = body.size_bytes
            return next(begun, None) or await body()

        try:
            if first["type"] == "http.request" and not await self._has_left(scope, body):
                await self.app(scope, received, noting)
        finally:
            if not is_answered:
                self.wary_until_s = time.monotonic() + WARY_S
            if body.size_bytes > LARGE_BYTES:
                give_back_memory()

    async def _has_left(self, scope: Scope, body: "_Gathered") -> bool:
        """Return whether the client left right after its request. The ingress is then not called."""
        # One request per turn of the event loop, which meanwhile learns who has left.
        async with self.turns:
            await asyncio.sleep(0)
        is_wary = time.monotonic() < self.wary_until_s and scope.get("state", {}).get("is_first")
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVES_S * bool(is_wary)):
                return body.is_whole and (await body())["type"] == "http.disconnect"
        return False

    async def _wait_for_turn(self, size_bytes: int) -> None:
        now_s = time.monotonic()
        self.next_large_s = max(now_s, self.next_large_s) + size_bytes / LARGE_BYTES_PER_S
        await asyncio.sleep(self.next_large_s - now_s)

    def _note(self, headers: dict[bytes, bytes]) -> None:
        room_tokens = headers.get(ROOM_TOKENS.lower().encode())
        # A 429 for a key's rate has no such header, since it does not concern other callers.
        if room_tokens is not None:
            self.full_until_s = time.monotonic() + FULL_S
            self.refusal = overloaded(int(headers[b"retry-after"]), int(room_tokens))
            self.most_bytes = int(room_tokens) + _FRAME_BYTES


@dataclass(eq=False)
class _Gathered:
    """``receive`` that gathers small pieces, since each message costs a call of the ingress."""

    receive: Receive
    is_whole: bool = False
    size_bytes: int = 0

    async def __call__(self) -> Message:
        if self.is_whole:  # only a disconnect can follow
            return await self.receive()
        body = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(GATHERED_S):
                while not self.is_whole and len(body) < GATHERED_BYTES:
                    message = await self.receive()
                    if message["type"] != "http.request":  # the client has left
                        return message
                    body += message.get("body", b"")
                    self.is_whole = not message.get("more_body", False)
        self.size_bytes += len(body)
        return {"type": "http.request", "body": body, "more_body": not self.is_whole}


def head_refusal(scope: Scope) -> RefusalError | None:
    """Refuse an address and headers that are too large. protocol.py only counts those that arrive in pieces."""
    head_bytes = len(scope["path"]) + len(scope["query_string"]) + sum(map(len, chain(*scope["headers"])))
    return LARGE_HEAD if head_bytes > MAX_HEAD_BYTES else None


def overloaded(retry_after_s: int, room_tokens: int | None) -> RefusalError:
    """Return the refusal of a request that would wait too long; one of ``room_tokens`` would be accepted."""
    headers = {} if room_tokens is None else {ROOM_TOKENS: str(room_tokens)}
    return RefusalError(
        429, "too many tokens are waiting; try again later", retry_after_s, headers, limit="queue_tokens"
    )


def middlewares() -> list[Middleware]:
    """Return the middleware. RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this function, which Serve calls before
    its proxy creates a uvicorn server."""
    # Serve 2.60 has no option for the protocol, so replace uvicorn's default.
    HTTP_PROTOCOLS["auto"] = "esmeray.service.http.protocol:LimitedProtocol"
    return [Middleware(Door)]
