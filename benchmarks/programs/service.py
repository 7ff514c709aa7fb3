"""Servers, and HTTP load on them, in processes of their own.

A load has bodies, a number of connections, and an end. Its outcome is the status and the milliseconds of every request.
Each connection sends its next request after the answer (closed loop). With a rate, requests begin at even times,
whether or not earlier ones were answered.
"""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import aiohttp
import numpy as np
import yaml

from benchmarks.harness.stage import REPOSITORY
from benchmarks.programs.processes import call

START_S = 180.0


@contextmanager
def server(command: Sequence[str], port: int, ready: str = "/ready") -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in the repository's root; yield its process once the path ``ready`` answers. End it with SIGTERM.

    It is killed only if it does not end: a killed launcher would leave its workers behind.
    """
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # In a session of its own: Ctrl-C in the terminal reaches the benchmark only, which then ends the server.
    process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True, **quiet)
    until_s = time.monotonic() + START_S
    try:
        while process.poll() is None and time.monotonic() < until_s:
            with suppress(OSError):
                urlopen(f"http://127.0.0.1:{port}{ready}", timeout=5).close()
                break
            time.sleep(0.2)
        else:
            raise RuntimeError(f"the server ended, or was not ready within {START_S:g} s")
        yield process
    finally:
        process.terminate()  # no effect if it has ended
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


@contextmanager
def service(folder: Path, model: dict[str, object], **more: object) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start our service with one model, on a Ray cluster of its own; yield its address and process."""
    port = free_port()
    path = folder / f"serve-{port}.yaml"  # a stage may start several services
    settings = {"serve": {"models": [model], "port": port, **more}, "ray": {"address": "local"}}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with server([sys.executable, "serve_ray.py", "--config", str(path)], port) as process:
        yield f"http://127.0.0.1:{port}", process


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Load:
    """Requests to send.

    Attributes:
        url: whole address.
        bodies: JSON texts, sent in turn.
        connections: number of concurrent connections of the closed loop.
        requests, seconds: when it ends; whichever comes first.
        rate: requests per second; None for the closed loop.
    """

    url: str
    bodies: Sequence[str]
    accept: str = "application/json"
    connections: int = 16
    requests: int = 1_000_000_000
    seconds: float = 3600.0
    rate: float | None = None


@dataclass
class Outcome:
    """Status (0 for a broken connection) and milliseconds of each request, and the seconds of the whole load."""

    statuses: list[int] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the accepted requests; NaN without any."""
        accepted = [ms for ms, status in zip(self.latencies_ms, self.statuses, strict=True) if status == 200]
        return float(np.percentile(accepted, percent)) if accepted else float("nan")


def answered(load: Load) -> Outcome:
    """Send the requests of a load from another process; return its outcome."""
    return Outcome(**call(f"{__name__}:send_all", load=load))


def send_all(load: dict[str, Any]) -> Outcome:
    """Send the requests from this process, and wait for their end."""
    return asyncio.run(_send_all(Load(**load)))


async def _send_all(load: Load) -> Outcome:
    outcome = Outcome()
    headers = {"Content-Type": "application/json", "Accept": load.accept}
    free = asyncio.Semaphore(load.requests if load.rate else load.connections)

    async def send(number: int) -> None:
        begun_s = time.perf_counter()
        status = 0
        try:
            async with session.post(load.url, data=load.bodies[number % len(load.bodies)], headers=headers) as answer:
                await answer.read()  # to its end, as a client that uses the answer
                status = answer.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass
        outcome.statuses.append(status)
        outcome.latencies_ms.append(1e3 * (time.perf_counter() - begun_s))
        free.release()

    start_s = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0)  # its own limit of 100 would queue requests here, unseen by the server
    async with (
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(load.requests):
            await free.acquire()
            if load.rate:
                # Due times count from the start, so that a late wake-up does not lower the rate.
                await asyncio.sleep(max(0.0, start_s + number / load.rate - time.perf_counter()))
            if time.perf_counter() >= start_s + load.seconds:
                break
            tasks.create_task(send(number))
    outcome.seconds = time.perf_counter() - start_s
    return outcome
