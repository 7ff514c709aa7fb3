"""No body takes more memory than eight times its size, blocks the event loop, or delays another caller's answer."""

import asyncio
import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from esmeray.service.http import answers, bodies, guard
from esmeray.service.http.guard import Guard
from esmeray.service.http.routes import native
from tests.service.serving import Serving, npy, problem

SIZE = 2_000_000
LARGE: dict[str, Any] = {"body_bytes": SIZE, "sequences": 1024, "residues": 200_000}
ALLOWANCE = 8_000_000
"""Bytes for allocations that do not grow with the body."""
JSON, FASTA, NPY = "application/json", "text/plain", "application/x-npy"


def filled(start: bytes, repeated: bytes, end: bytes = b"") -> bytes:
    return start + repeated * ((SIZE - len(start) - len(end)) // len(repeated)) + end


ATTACKS = {
    "records of nothing": (FASTA, filled(b"", b">\n")),
    "lines of a letter": (FASTA, filled(b">a\n", b"M\n")),
    "one id with a wide letter": (FASTA, filled(">\U0001f600".encode(), b"a")),
    "one sequence of masks": (FASTA, filled(b">a\n", b"<mask>")),
    "sequences of nothing": (JSON, filled(b'{"sequences":["M"', b',""', b"]}")),
    "one sequence with a wide letter": (JSON, filled('{"sequences":["\U0001f600'.encode(), b"M", b' "]}')),
    "one sequence in escapes": (JSON, filled(b'{"sequences":["', b"\\u004d", b'"]}')),
    "records": (JSON, filled(b'{"sequences":[{}', b',{"id":"a"}', b"]}")),
    "mutations": (JSON, filled(b'{"sequences":["MK"],"mutations":["K2R"', b',"K2R"', b"]}")),
    "lists": (JSON, filled(b'{"latents":[[]', b",[]", b"]}")),
    "deep lists": (JSON, filled(b"", b"[")),
    "numbers of a digit": (JSON, filled(b'{"latents":[[[1', b",1", b"]]]}")),
    "one number": (JSON, filled(b'{"latents":[[[1', b"1", b"]]]}")),
    "unknown fields of a record": (
        JSON,
        b'{"sequences":[{%s}]}' % b",".join(b'"%07d":1' % number for number in range(SIZE // 12)),
    ),
    "unknown fields": (JSON, b"{%s}" % b",".join(b'"%07d":1' % number for number in range(SIZE // 12))),
    "bytes as numbers": (NPY, npy(np.zeros((SIZE - 200, 1), np.uint8))),
    "an array of a gigabyte": (NPY, npy(np.zeros((0, 8))).replace(b"(0, 8)", b"(125000000,)")),
}
FIELDS = {"/v1/embeddings": b"input", "/embed": b"inputs", "/predict": b"inputs"}
ROUTES = (*FIELDS, "/v1/encode", "/v1/decode", "/v1/masked")


async def posted(app: Guard, path: str, kind: str, body: bytes) -> int:
    """Status of the answer to a body in pieces, sent to the app directly: this process has no client's copies of it."""
    headers = [(b"host", b"localhost"), (b"content-type", kind.encode())]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    starts = iter(range(0, len(body), 65_536))
    statuses: list[int] = []

    async def receive() -> Any:
        start = next(starts)
        return {"type": "http.request", "body": body[start : start + 65_536], "more_body": start + 65_536 < len(body)}

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    await app({**scope, "headers": headers, "http_version": "1.1", "scheme": "http"}, receive, send)
    return statuses[0]


def memory_bytes(which: str) -> int:
    """``VmRSS``, or ``VmHWM``, the maximum since its last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


@pytest.mark.parametrize("kind", ATTACKS)
def test_a_body_costs_at_most_eight_times_its_bytes(serving: Serving, kind: str):
    app = serving.app(limits=LARGE)
    content_type, body = ATTACKS[kind]
    for path in ROUTES:
        attack = body.replace(b'"sequences"', b'"%s"' % FIELDS.get(path, b"sequences"), 1)
        serving.run(posted(app, path, JSON, b"{}"))  # warm-up: loads modules and models
        Path("/proc/self/clear_refs").write_text("5")
        before = memory_bytes("VmRSS")
        assert serving.run(posted(app, path, content_type, attack)) in (200, 400, 413, 415, 422), path
        assert memory_bytes("VmHWM") - before <= 8 * SIZE + ALLOWANCE, path


def test_a_large_body_is_parsed_beside_the_event_loop(client: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    threads: list[str] = []

    def from_json(body: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return json.loads(body)

    monkeypatch.setattr(bodies, "from_json", from_json)
    for length in (1, bodies.SMALL_BYTES):
        client.post("/v1/encode", json={"sequences": ["M" * length]})
    assert [name.startswith("large") for name in threads] == [False, True]


LARGE_ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/encode": {"sequences": ["MKTAYIAKQR" * 20, "MK"], "output": "residues"},
    "/v1/embeddings": {"input": ["MK"], "encoding_format": "base64"},
    "/v1/masked": {"sequences": ["MKTAYI"], "mutations": ["K2R", "T3A"]},
    "/v1/classify": {"sequences": ["MKTAYI"] * 6, "model": "places"},
    "/v1/tokenize": {"sequences": ["MKTAYIAKQR"]},
    "/v1/search": {"sequences": ["MKTAYIAKQR"], "top_k": 12},
    "/embed": {"inputs": ["MKTAYIAKQR"]},
    "/embed_all": {"inputs": ["MKTAYIAKQR"]},
    "/tokenize": {"inputs": ["MKTAYIAKQR"]},
}


@pytest.mark.parametrize("path", LARGE_ANSWERS)
def test_a_large_answer_is_built_off_the_event_loop(client, monkeypatch, path: str):
    loops, encoded = [], answers.to_json

    def to_json(content: Any, **how: Any) -> bytes:
        with suppress(RuntimeError):
            loops.append(asyncio.get_running_loop())
        return encoded(content, **how)

    small = client.post(path, json=LARGE_ANSWERS[path])
    monkeypatch.setattr(answers, "TOGETHER", 10)
    monkeypatch.setattr(native, "MUTATIONS_AT_ONCE", 1)
    monkeypatch.setattr(answers, "to_json", to_json)
    large = client.post(path, json=LARGE_ANSWERS[path])
    assert large.status_code == 200 and large.content == small.content and not loops
    has_arrays = path in ("/v1/encode", "/v1/masked", "/v1/classify", "/embed", "/embed_all")
    assert ("content-length" not in large.headers) == has_arrays


def test_bodies_have_a_bound_together_which_leaves_room_for_small_ones(serving: Serving, monkeypatch):
    large, half = b'{"sequences":["MK"]}'.ljust(150_000), asyncio.Event()

    async def slow() -> Any:
        yield large[:100_000]
        await half.wait()
        yield large[100_000:]

    async def ask(address: str) -> None:
        async with httpx.AsyncClient(base_url=address, headers={"Content-Type": JSON}, timeout=30) as client:
            first = asyncio.create_task(client.post("/v1/encode", content=slow()))
            while app.body_bytes < 100_000:
                await asyncio.sleep(0.01)
            refused = await client.post("/v1/encode", content=large)
            assert "leave no room" in problem(refused, 503) and refused.headers["retry-after"] == "1"
            assert (await client.post("/v1/encode", json={"sequences": ["MK"]})).status_code == 200
            half.set()
            assert (await first).status_code == 200
            assert (await client.post("/v1/encode", content=large)).status_code == 200
            while app.body_bytes:  # the guard subtracts the body after the client has its answer
                await asyncio.sleep(0.01)

    monkeypatch.setattr(guard, "BODIES", 1)
    app = serving.app(limits={"body_bytes": 200_000})
    with serving.address(app) as address:
        asyncio.run(ask(address))


def test_what_was_answered_with_504_is_computed_no_further(serving: Serving):
    batcher = serving.calls["esm"].run.__self__._batcher  # type: ignore[attr-defined]
    with serving.client(limits={"timeout_s": 0.1}) as client:
        before = batcher.totals.tokens
        answer = client.post("/v1/masked", json={"sequences": ["MKTAYIAKQR" * 14], "method": "masked"})
        assert "no answer within" in problem(answer, 504)
        assert batcher.queued_tokens == 0 and batcher.totals.tokens - before < 140 * 142


def test_address_and_headers_have_a_bound_together(client: httpx.Client):
    query = "&".join(["mutations=K2R"] * 4_000)
    for path, headers in ((f"/v1/masked?{query}", {"x-a": "a" * 10_000}), ("/health", {"x-a": "a" * 70_000})):
        assert "65,536 bytes" in problem(client.get(path, headers=headers), 431)
