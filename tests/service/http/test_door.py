"""Answers of Ray Serve's proxy before a request reaches the ingress."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx

from esmeray.service.contract import Reply
from esmeray.service.http.door import GATHERED_BYTES, LINGER_S, Door
from tests.service.serving import Serving, problem


def test_what_has_no_room_is_refused_at_the_door_and_smaller_requests_pass(serving: Serving, monkeypatch: Any):
    asked: list[int] = []

    async def run(output: str, texts: list[str], caller: str) -> Reply:
        asked.append(len(texts[0]))
        if len(texts[0]) > 50:
            return Reply(refused="overloaded", retry_after_s=7, room_tokens=50)
        return await serving.calls["esm"].run(output, texts, caller)

    monkeypatch.setattr("esmeray.service.http.door.FULL_S", 60.0)
    app = serving.app({"esm": serving.calls["esm"]._replace(run=run)})
    with serving.address(Door(app)) as address, httpx.Client(base_url=address) as client:
        for _ in range(2):
            refused = client.post("/v1/encode", json={"sequences": ["M" * 200]})
            assert problem(refused, 429) == "too many tokens are waiting; try again later"
            assert refused.headers["retry-after"] == "7"
        smaller = httpx.post(f"{address}/v1/encode", json={"sequences": ["M" * 30]})  # another caller's
        assert client.get("/health").status_code == smaller.status_code == 200
    assert asked == [200, 30]


def test_serves_own_paths_and_headers_do_not_get_past_the_door(serving: Serving):
    seen: list[set[bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append({name for name, _ in scope["headers"]})
        await guard(scope, receive, send)

    guard = serving.app()
    headers = {"X-Request-Timeout-Seconds": "0.001", "X-Request-Disconnect-Disabled": "?1"}
    with serving.address(Door(app)) as address, httpx.Client(base_url=address) as client:
        for path in ("/-/routes", "/-/healthz", "/nothing"):
            assert "no such address" in problem(client.get(path, headers=headers), 404)
        assert client.get("/-/healthz", headers={"Host": "evil.example"}).status_code == 421
        reached = len(seen)
        assert "65,536 bytes" in problem(client.get("/health", headers={"X-Long": "a" * 70_000}), 431)
        assert len(seen) == reached
    assert not any(name.startswith(b"x-request-") for name in set().union(*seen))


def test_a_body_of_single_bytes_reaches_the_ingress_in_few_pieces(monkeypatch: Any):
    def sent_at(pauses_s: list[float]) -> list[tuple[bytes, bool]]:
        waits, seen = iter(pauses_s), []

        async def receive() -> Any:
            pause_s = next(waits, None)
            if pause_s is None:
                await asyncio.sleep(0.1 * bool(pauses_s))
                return {"type": "http.disconnect"}
            await asyncio.sleep(pause_s)
            return {"type": "http.request", "body": b"a", "more_body": pause_s != pauses_s[-1]}

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert pauses_s, "who left at once costs the ingress no call"
            while (message := await receive())["type"] == "http.request":
                seen.append((message["body"], message["more_body"]))

        scope = {"type": "http", "path": "/", "query_string": b"", "headers": []}
        asyncio.run(Door(app)(scope, receive, lambda message: None))
        return seen

    assert sent_at([0.0, 0.0, 0.001]) == [(b"aaa", False)]
    monkeypatch.setattr("esmeray.service.http.door.GATHERED_S", 0.5)
    assert sent_at([0.0, 60.0, 0.001])[:1] == [(b"a", True)]
    assert sent_at([]) == []


def test_who_leaves_right_after_a_request_costs_the_ingress_no_call(serving: Serving, monkeypatch: Any):
    monkeypatch.setattr("esmeray.service.http.door.LEAVES_S", 0.5)
    monkeypatch.setattr("esmeray.service.http.door.WARY_S", 60.0)
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        if scope["path"] == "/slow":  # until its client leaves
            while (await receive())["type"] != "http.disconnect":
                pass
        else:
            await guard(scope, receive, send)

    def seconds(get: Callable[..., httpx.Response]) -> float:
        return get(f"{address}/health").raise_for_status().elapsed.total_seconds()

    guard = serving.app()
    with serving.address(Door(app)) as address, httpx.Client() as keeping:
        host, port = address.removeprefix("http://").split(":")

        async def leave() -> None:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            writer.transport.abort()

        async def leave_all() -> None:
            await asyncio.gather(*(leave() for _ in range(200)))

        assert seconds(keeping.get) < 0.5
        with suppress(httpx.ReadTimeout):
            httpx.get(f"{address}/slow", timeout=0.2)
        # From now on, only new connections wait to see whether their clients disconnect, too.
        assert seconds(httpx.get) >= 0.5 > seconds(keeping.get)
        asyncio.run(leave_all())
        assert seconds(httpx.get) >= 0.5
    assert seen.count("/health") == 4 and len(seen) < 20


def test_a_foreign_page_is_refused_without_its_body():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    statuses: list[int] = []

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    headers = [(b"host", b"localhost"), (b"origin", b"https://elsewhere.example")]
    scope = {"type": "http", "method": "POST", "path": "/v1/encode", "query_string": b"", "headers": headers}
    start_s = time.monotonic()
    asyncio.run(Door(app)(scope, app, send))
    assert statuses[0] == 403 and time.monotonic() - start_s >= LINGER_S


def test_large_bodies_share_a_rate_and_small_ones_have_none(monkeypatch: Any):
    monkeypatch.setattr("esmeray.service.http.door.LARGE_BYTES_PER_S", 4_000_000)
    passed: list[int] = []

    async def send_all(door: Door, sizes: list[int]) -> float:
        async def post(size: int) -> None:
            # Pieces as from uvicorn, which reads up to 256 kB at once.
            pieces = [4 * GATHERED_BYTES] * (size // (4 * GATHERED_BYTES))

            async def receive() -> Any:
                if not pieces:
                    await asyncio.sleep(60)
                return {"type": "http.request", "body": b" " * pieces.pop(), "more_body": bool(pieces)}

            await door({"type": "http", "path": "/", "query_string": b"", "headers": []}, receive, print)

        start_s = time.monotonic()
        await asyncio.gather(*map(post, sizes))
        return time.monotonic() - start_s

    async def app(scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message["body"]), message["more_body"]
        passed.append(size)

    assert asyncio.run(send_all(Door(app), 4 * [900_000])) < 0.5
    assert asyncio.run(send_all(Door(app), 2 * [3_000_000])) > 0.7
    assert passed == [*4 * [12 * GATHERED_BYTES], *2 * [44 * GATHERED_BYTES]]
