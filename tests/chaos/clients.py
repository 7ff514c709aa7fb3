"""A hostile client beside eight ordinary ones: all of these are answered, about as fast as without it.

The service is a real one on a cluster of its own; the ordinary clients ask one request after the other, from another
process. Their 99th percentile beside an attack is held to theirs just before it, the memory of the service's
processes after it to that before.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.programs.service import Load, Outcome, begun_load, service
from esmeray.inference.embedding.job import run_job
from esmeray.inference.index.build import make_index
from esmeray.inference.index.section import IndexSection
from tests.inference.embedding.jobs import request
from tests.model.support import random_sequences

CLIENTS = 8
REPLICA, PROXY = "ray::ServeReplica", "ray::ProxyActor"
"""Names of the processes of a service, as Ray sets them."""
SLOWER, MORE_MEMORY = 2.0, 1.1
"""Times that an attack may make the ordinary clients' 99th percentile, and the memory that is left after it."""
PAUSE_S = 30.0
PROTEINS = 20_000
"""Of the index that the attacks by searches ask."""
ORDINARY = [json.dumps({"sequences": [text]}) for text in random_sequences([100, 200, 300, 400] * 500)]


def head(path: str, length: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", length, *headers, "Connection: close"]
    return "\r\n".join([*lines, "", ""]).encode()


def post(path: str, body: bytes, kind: str = "Content-Type: application/json", *headers: str) -> tuple[bytes, ...]:
    return head(path, f"Content-Length: {len(body)}", kind, *headers), body


class Attack(NamedTuple):
    """Connections at once, what each sends, piece after piece, and the seconds between two pieces.

    A connection that ``waits`` for its answer is followed by another, until ``times`` were made. ``path``: what the
    ordinary clients ask meanwhile.
    """

    connections: int
    pieces: Iterable[bytes]
    pause_s: float = 0.0
    waits: bool = True
    times: int = 1_000_000
    path: str = "/v1/encode"


def attacks() -> dict[str, Attack]:
    encode, json_type = "/v1/encode", "Content-Type: application/json"
    (long,) = random_sequences([1400])
    large, small = (json.dumps({"sequences": random_sequences([190] * number)}).encode() for number in (1000, 50))
    mutations = json.dumps({"sequences": [long], "mutations": 2_200_000 * [f"{long[1]}2R"]}).encode()
    masked = json.dumps({"sequences": [long], "method": "masked"}).encode()
    chunk = b"10000\r\n" + 2**16 * b" " + b"\r\n"
    get = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    trailer = head(encode, "Transfer-Encoding: chunked", json_type) + b"1\r\n{\r\n0\r\nX: "
    piece = 2**16 * b"a"
    wide, many = {"ids": ["P00000"], "top_k": PROTEINS - 1}, {"ids": [f"P{n:05d}" for n in range(1000)], "top_k": 20}
    return {
        **{f"a header of {size} MB": Attack(4, [get + b"X: ", *16 * size * [piece], b"\r\n\r\n"]) for size in (5, 122)},
        "a header, a byte a second": Attack(400, [get + b"X: ", *999 * [b"a"]], 1.0),
        "a header after a request": Attack(4, [get + b"\r\n" + get + b"X: ", *800 * [piece], b"\r\n\r\n"]),
        "an address of 50 MB": Attack(4, [b"GET /", *800 * [piece], b" HTTP/1.1\r\n\r\n"]),
        "trailers of 50 MB": Attack(4, [trailer, *800 * [piece], b"\r\n\r\n"]),
        "chunks of a byte": Attack(
            4, [head(encode, "Transfer-Encoding: chunked", json_type), *90 * [30_000 * b"1\r\n \r\n"]]
        ),
        "pipelined requests": Attack(4, [9000 * (get + b"\r\n")]),
        "wide searches": Attack(30, post("/v1/search", json.dumps(wide).encode()), path="/v1/search"),
        "searches of many": Attack(30, post("/v1/search", json.dumps(many).encode()), path="/v1/search"),
        "16 MB of '>' lines": Attack(2, post(encode, 7_990_000 * b">\n", "Content-Type: text/plain")),
        "2.2 million mutations": Attack(2, post("/v1/masked", mutations)),
        "masked, 1,400 residues": Attack(2, post("/v1/masked", masked)),
        "a byte a second": Attack(400, [head(encode, "Content-Length: 999", json_type), *999 * [b" "]], 1.0),
        "headers of 8 MB": Attack(4, [get, *(b"X-%d: " % n + 1000 * b"a" + b"\r\n" for n in range(8000)), b"\r\n"]),
        "chunks without end": Attack(4, [head(encode, "Transfer-Encoding: chunked", json_type), *2000 * [chunk]]),
        "JSON of 8 million levels": Attack(2, post(encode, b'{"sequences": ' + 8_000_000 * b"[")),
        "a foreign page": Attack(8, post(encode, large, "Origin: https://elsewhere.example")),
        "1,000 that disconnect": Attack(50, post(encode, small), waits=False, times=1000),
        "large legal requests": Attack(8, post(encode, large)),
        "pipelined garbage": Attack(8, [(100 * (get + b"\r\n")) + bytes(range(256)) * 4000]),
    }


class Trial(NamedTuple):
    """An attack, its answers, the ordinary clients' without and beside it, and memory before, within and after it."""

    name: str
    answers: Counter[str]
    calm: Outcome
    beside: Outcome
    memory: tuple[int, int, int]

    @property
    def wrong(self) -> list[str]:
        before, _, after = self.memory
        calm, beside = (outcome.percentile_ms(99) for outcome in (self.calm, self.beside))
        tests = {
            f"{self.name}: ordinary clients got {self.beside.by_status}": {*self.beside.statuses} == {200},
            f"{self.name}: p99 {beside:.0f} ms, {calm:.0f} without": beside <= SLOWER * calm,
            f"{self.name}: memory {before / 1e6:.0f} MB before, {after / 1e6:.0f} after": after <= MORE_MEMORY * before,
        }
        return [problem for problem, holds in tests.items() if not holds]


def trial(folder: Path, name: str, seconds: float) -> Trial:
    """An attack of so many seconds on a service of its own: what one left undone would slow the next one's clients."""
    # Without a cache, which would answer the ordinary clients after their first round.
    attack = attacks()[name]
    model: dict[str, object] = {"name": "esm", "source": "esm2_t6_8M", "random_weights": True, "cache_mb": 0}
    indexes = []
    if attack.path == "/v1/search":
        model = {"name": "small", "source": str(folder / "model"), "cache_mb": 0}
        indexes = [{"name": "proteins", "source": str(indexed(folder))}]
    with service(folder, model, indexes=indexes) as (address, process):
        ordinary = Load(address + attack.path, ORDINARY, connections=CLIENTS, seconds=seconds)
        processes = psutil.Process(process.pid)
        with begun_load(ordinary) as warm_up:
            warm_up()
        with begun_load(ordinary) as outcome:
            calm = outcome()
        before = resident_bytes(processes)
        with begun_load(ordinary) as outcome:
            port = int(address.rpartition(":")[2])
            answers, most = asyncio.run(attacked(port, attack, seconds, processes))
            beside = outcome()
        # Memory goes back some time after its request.
        until = time.monotonic() + PAUSE_S
        while (after := resident_bytes(processes)) > MORE_MEMORY * before and time.monotonic() < until:
            time.sleep(1)
    return Trial(name, answers, calm, beside, (before, max(most, after), after))


def indexed(folder: Path) -> Path:
    """An index of short proteins by a small model, both made at the first call."""
    index = folder / "index"
    if not index.exists():
        sequences = random_sequences([20] * PROTEINS)
        embedding = request(folder, sequences=sequences, output=folder / "vectors", tokens=4096, shard_tokens=100_000)
        run_job(embedding)
        make_index([embedding.output], IndexSection(output=index))
    return index


async def attacked(port: int, attack: Attack, seconds: float, processes: psutil.Process) -> tuple[Counter[str], int]:
    """Answers by the first line of each, and the most memory that was seen."""
    answers, numbers, most = Counter[str](), iter(range(attack.times)), 0

    async def connect() -> None:
        for _ in numbers:
            answer = "none"
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    with suppress(OSError):  # what refuses early closes while more is sent; its answer is there
                        for piece in attack.pieces:
                            writer.write(piece)
                            await writer.drain()
                            await asyncio.sleep(attack.pause_s)
                    if attack.waits:
                        answer = (await reader.readline()).decode("latin-1").strip() or "none"
                        while await reader.read(2**20):
                            pass
                finally:
                    writer.transport.abort()
            answers[answer] += 1

    tasks = [asyncio.create_task(connect()) for _ in range(attack.connections)]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        most = max(most, await asyncio.to_thread(resident_bytes, processes))
        await asyncio.sleep(0.2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return answers, most


def resident_bytes(starter: psutil.Process) -> int:
    """Memory of proxy, ingress and replicas alone, without that of the object store, which all share."""
    total = 0
    for process in starter.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if " ".join(process.cmdline()).startswith((PROXY, REPLICA)):
                total += process.memory_full_info().uss
    return total


def table(trials: Iterable[Trial]) -> Iterator[str]:
    yield "| attack | p99 without, ms | beside it | ordinary answers | its answers | MB before, most, after | right |"
    yield "|---|---|---|---|---|---|---|"
    for trial in trials:
        calm, beside = (outcome.percentile_ms(99) for outcome in (trial.calm, trial.beside))
        answers = ", ".join(f"{count} × {line}" for line, count in trial.answers.most_common(3))
        memory = ", ".join(f"{each / 1e6:.0f}" for each in trial.memory)
        right = "no" if trial.wrong else "yes"
        counts = trial.beside.by_status
        yield f"| {trial.name} | {calm:.0f} | {beside:.0f} | {counts} | {answers} | {memory} | {right} |"
