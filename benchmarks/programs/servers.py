"""Servers in processes of their own, for the length of a block."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import yaml

from benchmarks.programs.processes import REPOSITORY

START_S, END_S = 180.0, 60.0
REPLICA, PROXY = "ray::ServeReplica", "ray::ProxyActor"


@contextmanager
def server(command: Sequence[str], port: int, ready: str = "/ready") -> Iterator[subprocess.Popen[bytes]]:
    """The process of a command, once the address ``ready`` answers."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)} if command[0] == sys.executable else os.environ
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, **quiet)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}{ready}")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()


@contextmanager
def service(folder: Path, model: dict[str, object], **settings: object) -> Iterator[str]:
    """The address of our service with one model, on a Ray cluster of its own."""
    port = free_port()
    path = folder / f"serve-{port}.yaml"
    write_settings(path, port, model, **settings)
    with server([sys.executable, "serve_ray.py", "--config", str(path)], port):
        yield f"http://127.0.0.1:{port}"


def write_settings(path: Path, port: int, model: dict[str, object], **settings: object) -> None:
    """The settings of our service as a file."""
    own = {"models": [model], "port": port, "ray": {"address": "local"}}
    path.write_text(yaml.safe_dump(own | settings), encoding="utf-8")


def replicas() -> list[psutil.Process]:
    """Processes of Serve's replicas, those of models first: the largest."""
    processes = [
        process for process in psutil.process_iter(["cmdline"]) if REPLICA in " ".join(process.info["cmdline"])
    ]
    return sorted(processes, key=lambda process: process.memory_info().rss, reverse=True)


def service_bytes() -> int:
    """Resident memory of the service's own processes: replicas and proxy."""
    names = REPLICA, PROXY
    processes = (p for p in psutil.process_iter(["cmdline"]) if " ".join(p.info["cmdline"]).startswith(names))
    return sum(process.memory_info().rss for process in processes)


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(process: subprocess.Popen[bytes], address: str) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            urlopen(address, timeout=5).close()
            return
        except (URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"the server was not ready within {START_S:g} s")
