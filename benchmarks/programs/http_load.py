"""Load on an HTTP server of this machine, from a process of its own.

In: bodies, a number of connections, and when to stop. Out: status and milliseconds of every request. Connections ask
one after the other (closed loop); with a rate, requests begin at even or random (Poisson) times, whether or not earlier
ones were answered.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from benchmarks.programs.processes import begun


@dataclass
class Load:
    """Requests to send: to where, for how long.

    Attributes:
        url: whole address.
        bodies: JSON texts, sent in turn.
        connections: at once, of the closed loop.
        requests, seconds: after which it ends; whichever comes first.
        rate: requests a second; None for the closed loop.
        even: with a rate: requests begin at even times, not at random ones.
    """

    url: str
    bodies: Sequence[str]
    accept: str = "application/json"
    connections: int = 16
    requests: int = 1_000_000_000
    seconds: float = 3600.0
    rate: float | None = None
    even: bool = False


@dataclass
class Outcome:
    """Answers: status (0 for a broken connection), milliseconds, the seconds of all, and 503 without Retry-After."""

    statuses: list[int] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    unexplained: int = 0

    @property
    def counts(self) -> Counter[int]:
        """Answers by status."""
        return Counter(self.statuses)

    @property
    def by_status(self) -> str:
        return str(dict(sorted(self.counts.items())))

    def percentile_ms(self, percent: float) -> float:
        """Of the accepted requests."""
        accepted = [ms for ms, status in zip(self.latencies_ms, self.statuses, strict=True) if status == 200]
        return float(np.percentile(accepted, percent)) if accepted else float("nan")


@contextmanager
def begun_load(load: Load) -> Iterator[Callable[[], Outcome]]:
    """A load from another process; yields a callable that waits for its end."""
    with begun(f"{__name__}:put_on", load=load) as result:
        yield lambda: Outcome(**result())


def put_on(load: dict[str, Any]) -> Outcome:
    """Put the load on from this process, and wait for its end."""
    return asyncio.run(_run(Load(**load)))


async def _run(load: Load) -> Outcome:
    outcome = Outcome()
    headers = {"Content-Type": "application/json", "Accept": load.accept}
    start_s = time.perf_counter()
    end_s = start_s + load.seconds
    connector = aiohttp.TCPConnector(limit=0)  # its own limit of 100 would queue requests here, unseen by the server
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:

        async def ask(number: int) -> None:
            body = load.bodies[number % len(load.bodies)].encode()
            begun_s = time.perf_counter()
            status = 0
            try:
                async with session.post(load.url, data=body, headers=headers) as answer:
                    await answer.read()  # to its end, as a client that uses the answer
                    status = answer.status
                    outcome.unexplained += status == 503 and "Retry-After" not in answer.headers
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass
            outcome.statuses.append(status)
            outcome.latencies_ms.append(1e3 * (time.perf_counter() - begun_s))

        async def connection(numbers: Any) -> None:
            for number in numbers:
                if time.perf_counter() >= end_s:
                    return
                await ask(number)

        if load.rate is None:
            # Of one iterator: a connection that is answered sooner asks more often.
            numbers = iter(range(load.requests))
            await asyncio.gather(*(connection(numbers) for _ in range(load.connections)))
        else:
            tasks = []
            due_s = start_s
            for number in range(load.requests):
                due_s += 1 / load.rate if load.even else random.expovariate(load.rate)
                if due_s >= end_s:
                    break
                # By times that are due since the start, so that a late wake-up makes the rate no lower.
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                tasks.append(asyncio.create_task(ask(number)))
            await asyncio.gather(*tasks)
    outcome.seconds = time.perf_counter() - start_s
    return outcome
