"""Refusals of requests and their bodies.

The routes of text-embeddings-inference use the format of that API. All other routes use RFC 9457
(application/problem+json); its member ``error`` is the object that OpenAI's clients read. A refusal repeats at most the
id of a record and the name of an unknown field from the request.
"""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

MAX_BYTES = 4096
_TEI_ROUTES = (
    *("/embed", "/embed_all", "/predict", "/tokenize", "/info"),
    # Not served, but their 404 has the format of that API.
    *("/embed_sparse", "/rerank", "/similarity", "/decode"),
)
_TEI_TYPES = {400: "Empty", 401: "Unauthorized", 429: "Overloaded", 503: "Unhealthy"}
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
ROOM_TOKENS = "X-Room-Tokens"
"""Header of a refusal for overload: tokens of a request that would be accepted now."""


class RefusalError(Exception):
    """Refusal of a request.

    Args:
        status: HTTP status.
        detail: one sentence: what is wrong, where, and what to do.
        retry_after_s: value of the header Retry-After.
        headers: further headers.
        facts: further members of the body: ``record``, ``limit``, and ``param`` and ``code`` for OpenAI's clients.
    """

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

    def response(self, scope: Scope, request_id: str, headers: Mapping[str, str] | None = None) -> Response:
        # An id or a path comes from the caller and may end up in a terminal.
        detail = printable(self.detail, longest=500)
        other_types = ("Validation", "invalid_request_error") if self.status < 500 else ("Backend", "server_error")
        if scope["path"] in _TEI_ROUTES or (scope["method"], scope["path"]) == ("POST", "/"):
            body: dict[str, Any] = {"error": detail, "error_type": _TEI_TYPES.get(self.status, other_types[0])}
            media_type = "application/json"
        else:
            body = {
                "type": "about:blank",
                "title": HTTPStatus(self.status).phrase,
                "status": self.status,
                "detail": detail,
                "error": {
                    "message": detail,
                    "type": _OPENAI_TYPES.get(self.status, other_types[1]),
                    "param": self.facts.get("param"),
                    "code": self.facts.get("code"),
                },
                **{key: printable(value) if isinstance(value, str) else value for key, value in self.facts.items()},
                "request_id": request_id,
            }
            media_type = "application/problem+json"
        headers = {**self.headers, **(headers or {})}  # a copy: the proxy sends one refusal many times
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"  # RFC 9110 asks for it
        return Response(json.dumps(body, ensure_ascii=False).encode()[:MAX_BYTES], self.status, headers, media_type)


def printable(text: str, longest: int = 100) -> str:
    """Return the text without control characters, cut to ``longest``."""
    shown = "".join(letter if letter.isprintable() else "�" for letter in text[:longest])
    return shown if len(text) <= longest else f"{shown}..."
