"""What a connection sends has limits before it is a request: bytes, whatever their form, and seconds."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import uvicorn
from uvicorn.config import HTTP_PROTOCOLS

from esmeray.service.http.door import Door, middlewares
from esmeray.service.http.protocol import LimitedProtocol
from tests.service.serving import Serving

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = (
    b"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
)
# The start of a request, and a piece that follows without end.
ENDLESS = {
    "one header": (GET + b"X: ", 1000 * b"a"),
    "the name of a header": (GET, 1000 * b"a"),
    "many headers": (GET, b"X: a\r\n"),
    "headers of HTTP/1.0": (b"GET /health HTTP/1.0\r\n", b"X: a\r\n"),
    "the address": (b"GET /", 1000 * b"a"),
    "empty lines": (b"", b"\r\n"),
    "a header after a request": (GET + b"\r\n" + GET + b"X: ", 1000 * b"a"),
    "an extension of a chunk": (CHUNKED + b"1;", 1000 * b"a"),
    "trailers": (CHUNKED + b"1\r\n>\r\n0\r\n", b"X: a\r\n"),
}


@contextmanager
def connected(serving: Serving) -> Iterator[socket.socket]:
    with serving.address(Door(serving.app())) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            yield connection


def answers(connection: socket.socket) -> list[tuple[int, str]]:
    """Status and detail of each answer until the server ends the connection."""
    text = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65_536):
            text += piece
    seen = []
    for answer in text.split(b"HTTP/1.1 ")[1:]:
        head, _, body = answer.partition(b"\r\n\r\n")
        seen.append((int(head[:3]), json.loads(body).get("detail", "")))
        assert seen[-1][0] == 200 or b"application/problem+json" in head
    return seen


@pytest.mark.parametrize("form", ENDLESS)
def test_what_never_becomes_a_request_is_refused_while_it_arrives(serving: Serving, form: str):
    start, piece = ENDLESS[form]
    with connected(serving) as connection:
        connection.sendall(start)
        # All of it is read: a client that is still sending when the server closes may lose the answer.
        connection.sendall(piece * (200_000 // len(piece)))
        *earlier, (status, detail) = answers(connection)
    assert (status, earlier) == (431, [(200, "")] if form == "a header after a request" else [])
    assert "65,536 bytes" in detail


def test_a_head_may_arrive_in_single_bytes_but_not_for_ever(serving: Serving, monkeypatch):
    with connected(serving) as connection:
        for byte in GET + b"\r\n":
            connection.sendall(bytes([byte]))
        connection.sendall(GET + b"\r\n" + GET + b"Connection: close\r\n\r\n")  # two more at once
        assert answers(connection) == [(200, "")] * 3
    monkeypatch.setattr("esmeray.service.http.protocol.HEAD_S", 0.2)
    with connected(serving) as connection:
        connection.sendall(GET + b"X: ")
        with pytest.raises(OSError):
            while True:  # until the server closes
                connection.sendall(b"a")
                time.sleep(0.05)


def test_serves_proxy_makes_its_connections_by_this_protocol(monkeypatch):
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", "")  # put back after the test
    assert [middleware.cls for middleware in middlewares()] == [Door]
    config = uvicorn.Config(lambda: None)
    config.load()
    assert config.http_protocol_class is LimitedProtocol
