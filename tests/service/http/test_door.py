"""Answers of Serve's proxy before a request reaches the ingress."""

import asyncio
from typing import Any

import httpx

from esmeray.service.contract import Reply
from esmeray.service.http.door import Door
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
            assert problem(refused, 429) == "too much is waiting; try again later"
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


def test_a_body_of_single_bytes_is_one_piece_for_the_ingress_or_one_in_a_while(monkeypatch: Any):
    def sent_at(pauses_s: list[float]) -> list[tuple[bytes, bool]]:
        waits, seen = iter(pauses_s), []

        async def receive() -> Any:
            pause_s = next(waits, None)
            if pause_s is None:
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
