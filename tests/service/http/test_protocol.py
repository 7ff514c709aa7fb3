"""Connections have limits before a request is complete: bytes, in whatever form, and seconds."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.config import HTTP_PROTOCOLS

from esmeray.service.http.door import Door, middlewares
from esmeray.service.http.protocol import PARSED_BYTES, LimitedProtocol
from tests.service.serving import Serving

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = (
    b"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
)
# The start of a request, and a piece that is repeated endlessly.
ENDLESS = {
    "one header": (GET + b"X: ", 1000 * b"a"),
    "the name of the header": (GET, 1000 * b"a"),
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
    """Status and detail of each answer until the server closes the connection."""
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
        # The server reads all bytes: a client that is still sending when the server closes may lose the answer.
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


def chunks(size: int, number: int) -> bytes:
    """A chunked body with one protein in the first chunk and blanks in the others."""
    chunk = b"%x\r\n" % size + size * b" " + b"\r\n"
    return CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"6\r\n>a\nMKT\r\n" + number * chunk


def test_a_body_of_tiny_chunks_is_refused_and_of_small_ones_answered(serving: Serving):
    with connected(serving) as connection:
        connection.sendall(chunks(1, 20_000))  # without end
        ((status, detail),) = answers(connection)
    assert status == 400 and "32 bytes on average" in detail
    for size, number in ((100, 1500), (1, 900)):
        with connected(serving) as connection:
            connection.sendall(chunks(size, number) + b"0\r\n\r\n")
            assert answers(connection) == [(200, "")]


def test_pipelined_requests_are_built_a_few_at_a_time_and_all_answered(serving: Serving, monkeypatch):
    waiting: list[int] = []
    start = LimitedProtocol._start_asgi_task

    def noting(self: LimitedProtocol, *arguments: Any) -> None:
        waiting.append(len(self.pipeline))
        start(self, *arguments)

    monkeypatch.setattr(LimitedProtocol, "_start_asgi_task", noting)
    for number in (10, 3000):
        with connected(serving) as connection:
            connection.sendall((number - 1) * (GET + b"\r\n") + GET + b"Connection: close\r\n\r\n")
            assert answers(connection) == number * [(200, "")]
    assert len(waiting) == 3010 and max(waiting) < PARSED_BYTES / len(GET)


def test_a_body_is_whole_whose_request_waits_for_another_answer(serving: Serving):
    body = b">a\nMKT" + 150_000 * b" "
    head = b"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n"
    post = head % len(body) + b"%s\r\n" + body
    with connected(serving) as connection:
        connection.sendall(post % b"" + GET + b"\r\n" + post % b"Connection: close\r\n")
        assert answers(connection) == [(200, "")] * 3


def test_requests_behind_a_refused_one_are_not_answered(serving: Serving):
    with connected(serving) as connection:
        connection.sendall(50 * (GET + b"\r\n") + b"\0")
        answered = answers(connection)
    assert len(answered) < 10 and answered[0] == (400, "this is not HTTP/1.1")


def test_what_is_not_http_is_refused_in_the_form_of_other_refusals(serving: Serving):
    with connected(serving) as connection:
        connection.sendall(GET + b"\r\n")
        connection.recv(1)
        time.sleep(0.5)
        connection.sendall(bytes(range(256)) * 4000)
        text = b""
        while piece := connection.recv(65_536):
            text += piece
    assert b"400 Bad Request" in text and b"this is not HTTP/1.1" in text


def test_serves_proxy_makes_its_connections_by_this_protocol(monkeypatch):
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", "")  # restored after the test
    assert [middleware.cls for middleware in middlewares()] == [Door]
    config = uvicorn.Config(lambda: None)
    config.load()
    assert config.http_protocol_class is LimitedProtocol
