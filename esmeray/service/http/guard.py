"""Outermost layer of the ingress: access, limits on bytes and time, JSON log lines, and metrics.

Bodies are counted while they arrive. Sequences and keys are never logged.
"""

import asyncio
import json
import logging
import re
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from esmeray.common.processor import give_back_memory
from esmeray.service.contract import REQUESTS
from esmeray.service.http.access import ANYBODY, PUBLIC, check_page
from esmeray.service.http.bodies import SMALL_BYTES
from esmeray.service.http.door import LARGE_BYTES, head_refusal
from esmeray.service.http.refusals import RefusalError
from esmeray.service.http.routes.common import Service
from esmeray.service.section import LimitsSection

log = logging.getLogger("esmeray.service")

REQUEST_ID = b"x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
BODY_S = 20.0
"""Seconds that a request's body may take to arrive."""
BODIES = 4
"""Number of the largest bodies that are held at once."""
AFTER_END_S = 5
"""Retry-After in seconds while the service ends: until then it may have a successor."""
_NOT_LOGGED = ("health", "ready", "metrics")
_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]


@dataclass(eq=False)
class Guard:
    """ASGI middleware; see the module."""

    app: ASGIApp
    service: Service
    adds_request_id: bool = True
    ongoing: int = 0
    body_bytes: int = 0
    """Bytes received so far of the bodies of all ongoing requests."""
    draining: bool = False
    """Refuse new requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        service = self.service
        # Answer HEAD, which probes send, as GET. The server leaves out the body, since its own scope says HEAD.
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        # POST / of text-embeddings-inference needs a key, unlike the page at GET /.
        is_root = (scope["method"], scope["path"]) == ("POST", "/")
        if is_root:
            scope = {**scope, "path": "/embed"}
        headers = dict(scope["headers"])
        # Keep the caller's own id, so that both logs can be compared. The pattern rules out forged log lines.
        callers_id = headers.get(REQUEST_ID, b"").decode("latin-1")
        request_id = callers_id if _REQUEST_ID.fullmatch(callers_id) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        headers_out = [(REQUEST_ID, request_id.encode())] if self.adds_request_id else []
        scope["state"]["answer_headers"] = headers_out  # routes may add some
        answer = _Answer(send, request_id, headers_out)
        body = _Body(receive, self, time.monotonic() + BODY_S)
        if self.draining and scope["path"] != "/health":  # the process still answers
            # A client that sends it again connects again, and so reaches a successor.
            detail = "the service is ending; send the request again"
            ending = RefusalError(503, detail, AFTER_END_S, {"Connection": "close"})
            return await answer.refuse(ending, scope, receive)
        start_s = time.perf_counter()
        self.ongoing += 1
        service.models.metrics.ongoing.set(self.ongoing)
        try:
            if self.ongoing > REQUESTS:
                raise RefusalError(429, "too many requests at once; try again later", 1, limit="requests")
            _check_headers(scope, headers, service.limits)
            # The key is checked first: without one, a caller does not learn which addresses exist.
            host = headers.get(b"host", b"").decode("latin-1")
            service.access.check_host(host)
            check_page(host, scope, headers)
            key = service.access.key_of(scope["path"], headers.get(b"authorization", b"").decode("latin-1"))
            scope["state"]["key"] = key
            # The caller in a replica's fair queue: the key, or without keys the connection.
            host_and_port = scope.get("client") or ("", 0)
            scope["state"]["ongoing"] = lambda: self.ongoing
            scope["state"]["caller"] = "{}:{}".format(*host_and_port) if key is ANYBODY else key.name
            service.access.charge(key, "requests", 1)
            # Shielded below: otherwise a cancelled request would end the loading for all.
            loading = service.models.load()
            async with asyncio.timeout(service.limits.timeout_s):
                if scope["path"] not in PUBLIC:
                    await asyncio.shield(loading)
                if is_root and service.models.named(None).label_kind:  # known only once the models are loaded
                    scope["path"] = "/predict"
                await self.app(scope, body, answer)
        except RefusalError as refusal:
            await answer.refuse(refusal, scope, receive)
        except TimeoutError:
            detail = f"no answer within {service.limits.timeout_s:g} s; send fewer sequences at once"
            await answer.refuse(RefusalError(504, detail, limit="timeout_s"), scope, receive)
        except Exception:
            if not answer.status:
                raise
            # Starlette has answered and logged it; uvicorn would log it again and close the connection.
        finally:  # also if the client left, which cancels this task
            self.ongoing -= 1
            self.body_bytes -= body.arrived_bytes
            self._note(scope, answer, time.perf_counter() - start_s)
            # Here, where the body is freed: also of a request that was refused while its body arrived.
            if body.arrived_bytes > LARGE_BYTES:
                give_back_memory()

    def _note(self, scope: Scope, answer: "_Answer", seconds: float) -> None:
        endpoint = getattr(scope.get("route"), "name", "other")
        self.service.models.metrics.ongoing.set(self.ongoing)
        self.service.models.metrics.requests.labels(endpoint, str(answer.status)).inc()
        self.service.models.metrics.seconds.labels(endpoint).observe(seconds)
        if endpoint in _NOT_LOGGED:  # by probes, every few seconds
            return
        state = scope["state"]
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request": answer.request_id,
            "endpoint": endpoint,
            "status": answer.status,
            "key": state["key"].name if "key" in state else None,
            **{name: state[name] for name in ("model", "sequences", "residues") if name in state},
            "seconds": round(seconds, 4),
            "bytes": answer.sent_bytes,
        }
        log.info(json.dumps(line))


def _check_headers(scope: Scope, headers: dict[bytes, bytes], limits: LimitsSection) -> None:
    """Refuse a request that its headers already rule out."""
    if (refusal := head_refusal(scope)) is not None:  # if the proxy has no door
        raise refusal
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limits.body_bytes:
        raise _too_large(limits)
    # A megabyte of zeros is a kilobyte of gzip, so limits on received bytes would mean nothing.
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise RefusalError(415, "send the body without compression")


@dataclass(eq=False)
class _Body:
    """``receive`` of a request. Refuses a body that is too large or too slow, or for which there is no memory left."""

    receive: Receive
    guard: Guard
    until_s: float
    is_whole: bool = False
    arrived_bytes: int = 0

    async def __call__(self) -> Message:
        limits = self.guard.service.limits
        if self.is_whole:  # only a disconnect can follow
            return await self.receive()
        try:
            async with asyncio.timeout(max(0.0, self.until_s - time.monotonic())):
                message = await self.receive()
        except TimeoutError:
            raise RefusalError(408, f"the body took more than {BODY_S:g} s to arrive", limit="body_s") from None
        size = len(message.get("body", b""))
        self.arrived_bytes += size
        self.guard.body_bytes += size
        if self.arrived_bytes > limits.body_bytes:
            raise _too_large(limits)
        # Small bodies are accepted beyond the limit, so that slow large ones do not block them. The number of
        # requests bounds them.
        if self.guard.body_bytes > BODIES * limits.body_bytes and self.arrived_bytes > SMALL_BYTES:
            raise RefusalError(
                503, "the bodies of other requests leave no room for this one; try again later", 1, limit="bodies_bytes"
            )
        self.is_whole = not message.get("more_body", False)
        return message


def _too_large(limits: LimitsSection) -> RefusalError:
    return RefusalError(
        413, f"the body has more than {limits.body_bytes:,} bytes; send fewer sequences at once", limit="body_bytes"
    )


@dataclass(eq=False)
class _Answer:
    """``send`` of a request. Adds headers and records status and size."""

    send: Send
    request_id: str
    headers: list[tuple[bytes, bytes]]
    status: int = 0
    sent_bytes: int = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", []), *_HEADERS, *self.headers]
        self.sent_bytes += len(message.get("body", b""))
        await self.send(message)

    async def refuse(self, refusal: RefusalError, scope: Scope, receive: Receive) -> None:
        """Answer with the refusal, unless an answer has begun."""
        if not self.status:
            await refusal.response(scope, self.request_id)(scope, receive, self)
