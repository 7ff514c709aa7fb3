"""A hostile client and eight ordinary ones: the ordinary requests succeed, about as fast as without the attack.

The service runs on a cluster of its own. The ordinary clients run in another process and send one request after the
other. Two values are limited relative to their values just before the attack:

- the 99th percentile of the ordinary clients' latency, during the attack;
- the memory of the service's processes, after the attack.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.programs.service import Load, Outcome, answered, service
from esmeray.inference.embedding.job import run_job
from esmeray.inference.index.build import IndexSection, make_index
from tests.inference.embedding.jobs import request
from tests.model.support import random_sequences

CLIENTS = 8
REPLICA, PROXY = "ray::ServeReplica", "ray::ProxyActor"
"""Process titles that Ray sets for the processes of a service."""
SLOWER, MORE_MEMORY = 2.0, 1.1
"""Maximum ratio of the ordinary clients' 99th percentile, and of the memory after the attack, to the values before."""
PAUSE_S = 30.0
PROTEINS = 20_000
"""Number of proteins in the index that attacks search."""
ORDINARY = [json.dumps({"sequences": [text]}) for text in random_sequences([100, 200, 300, 400] * 500)]


def head(path: str, length: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", length, *headers, "Connection: close"]
    return "\r\n".join([*lines, "", ""]).encode()


def post(path: str, body: bytes, kind: str = "Content-Type: application/json", *headers: str) -> tuple[bytes, ...]:
    return head(path, f"Content-Length: {len(body)}", kind, *headers), body


class Attack(NamedTuple):
    """An attack on the service.

    Attributes:
        connections: number of concurrent connections; each is followed by the next when it ends.
        pieces: bytes that a connection sends, piece by piece.
        pause_s: seconds between two pieces.
        waits: whether a connection waits for its answer before it ends.
        times: maximum number of connections in total.
        path: path that the ordinary clients request.
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
    """An attack's answers, the ordinary clients' outcomes without and during it, and the service's memory in bytes.

    ``memory`` has the value before the attack, the maximum, and the value after it.
    """

    name: str
    answers: Counter[str]
    calm: Outcome
    during: Outcome
    memory: tuple[int, int, int]

    @property
    def wrong(self) -> list[str]:
        before, _, after = self.memory
        calm, during = (outcome.percentile_ms(99) for outcome in (self.calm, self.during))
        tests = {
            f"{self.name}: ordinary clients got {Counter(self.during.statuses)}": {*self.during.statuses} == {200},
            f"{self.name}: p99 {during:.0f} ms, {calm:.0f} without": during <= SLOWER * calm,
            f"{self.name}: memory {before / 1e6:.0f} MB before, {after / 1e6:.0f} after": after <= MORE_MEMORY * before,
        }
        return [problem for problem, holds in tests.items() if not holds]


def trial(folder: Path, name: str, seconds: float) -> Trial:
    """Attack a new service for a number of seconds: unfinished work of another attack would slow the clients."""
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
        answered(ordinary)  # warm-up
        calm = answered(ordinary)
        before = resident_bytes(processes)
        with ThreadPoolExecutor(1) as pool:
            outcome = pool.submit(answered, ordinary)
            port = int(address.rpartition(":")[2])
            answers, most = asyncio.run(attacked(port, attack, seconds, processes))
            during = outcome.result()
        # Memory is released some time after its request.
        until = time.monotonic() + PAUSE_S
        while (after := resident_bytes(processes)) > MORE_MEMORY * before and time.monotonic() < until:
            time.sleep(1)
    return Trial(name, answers, calm, during, (before, max(most, after), after))


def indexed(folder: Path) -> Path:
    """Return an index of short proteins embedded by a small model; the first call creates both."""
    index = folder / "index"
    if not index.exists():
        sequences = random_sequences([20] * PROTEINS)
        embedding = request(folder, sequences=sequences, output=folder / "vectors", tokens=4096, shard_tokens=100_000)
        run_job(embedding)
        make_index([embedding.output], IndexSection(output=index))
    return index


async def attacked(port: int, attack: Attack, seconds: float, processes: psutil.Process) -> tuple[Counter[str], int]:
    """Run an attack; return the number of answers per status line, and the maximum memory in bytes."""
    answers, numbers, most = Counter[str](), iter(range(attack.times)), 0

    async def connect() -> None:
        for _ in numbers:
            answer = "none"
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    with suppress(OSError):  # an early refusal closes the connection; its answer is readable
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
    """Memory of proxy, ingress and replicas, without the object store that they share."""
    total = 0
    for process in starter.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if " ".join(process.cmdline()).startswith((PROXY, REPLICA)):
                total += process.memory_full_info().uss
    return total


def table(trials: Iterable[Trial]) -> Iterator[str]:
    yield "| attack | p99 before, ms | during, ms | ordinary answers | its answers | MB before, max, after | right |"
    yield "|---|---|---|---|---|---|---|"
    for trial in trials:
        calm, during = (outcome.percentile_ms(99) for outcome in (trial.calm, trial.during))
        answers = ", ".join(f"{count} × {line}" for line, count in trial.answers.most_common(3))
        memory = ", ".join(f"{peak / 1e6:.0f}" for peak in trial.memory)
        right = "no" if trial.wrong else "yes"
        counts = dict(Counter(trial.during.statuses))
        yield f"| {trial.name} | {calm:.0f} | {during:.0f} | {counts} | {answers} | {memory} | {right} |"
