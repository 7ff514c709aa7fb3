"""Refusals of a request, and the body that each API has for them: RFC 9457 (application/problem+json), or that of
text-embeddings-inference on its routes. No body echoes what was sent but the id of a record.
"""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

MOST_BYTES = 4096
TEI_ROUTES = ("/embed", "/embed_all", "/info", "/tokenize")
_TEI_TYPES = {400: "empty", 401: "unauthorized", 422: "validation", 424: "backend", 429: "overloaded", 503: "unhealthy"}
ROOM_TOKENS = "X-Room-Tokens"
"""Header of a refusal for overload: tokens of a request that would have been taken."""


class RefusalError(Exception):
    """A request that is not answered: the status of HTTP, one sentence of what is wrong, where, and what to do, and
    further members of the body, as ``record`` and ``limit``."""

    def __init__(
        self,
        status: int,
        detail: str,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.facts = status, detail, facts
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)

    def response(self, path: str, request_id: str) -> Response:
        # What it has of the request, an id or a path, is a stranger's, and ends up in terminals.
        detail = printable(self.detail, longest=600)
        if path in TEI_ROUTES:
            other_type = "validation" if self.status < 500 else "backend"
            body: dict[str, Any] = {"error": detail, "error_type": _TEI_TYPES.get(self.status, other_type)}
            media_type = "application/json"
        else:
            body = {
                "type": "about:blank",
                "title": HTTPStatus(self.status).phrase,
                "status": self.status,
                "detail": detail,
                **{key: printable(value) if isinstance(value, str) else value for key, value in self.facts.items()},
                "request_id": request_id,
            }
            media_type = "application/problem+json"
        headers = dict(self.headers)  # the door answers with one refusal many times
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"  # RFC 9110 asks for it
        return Response(json.dumps(body, ensure_ascii=False).encode()[:MOST_BYTES], self.status, headers, media_type)


def printable(text: str, longest: int = 100) -> str:
    """The text without control characters, cut."""
    shown = "".join(letter if letter.isprintable() else "�" for letter in text[:longest])
    return shown if len(text) <= longest else f"{shown}..."
