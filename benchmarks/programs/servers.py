"""Servers in processes of their own, for the length of a block."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import psutil
import yaml

from benchmarks.programs.processes import started

START_S = 180.0
REPLICA, PROXY = "ray::ServeReplica", "ray::ProxyActor"


@contextmanager
def server(command: Sequence[str], port: int, ready: str = "/ready") -> Iterator[subprocess.Popen[str]]:
    """The process of a command, once the address ``ready`` answers."""
    with started(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _wait_until_ready(process, f"http://127.0.0.1:{port}{ready}")
        yield process


@contextmanager
def service(folder: Path, model: dict[str, object], **more: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address and the process of our service with one model, on a Ray cluster of its own; ``more`` settings."""
    port = free_port()
    path = folder / f"serve-{port}.yaml"  # a case may start several, one after the other
    settings = {"serve": {"models": [model], "port": port, **more}, "ray": {"address": "local"}}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with server([sys.executable, "serve_ray.py", "--config", str(path)], port) as process:
        yield f"http://127.0.0.1:{port}", process


def serve_processes(*names: str) -> list[psutil.Process]:
    """Processes of Ray Serve that are called so, the largest first."""
    # Ray names its processes after their actors in the title, which is the command line that others see.
    processes = (p for p in psutil.process_iter(["cmdline"]) if " ".join(p.info["cmdline"] or ()).startswith(names))
    return sorted(processes, key=lambda process: process.memory_info().rss, reverse=True)


def service_bytes() -> int:
    """Resident memory of the service's own processes: replicas and proxy."""
    return sum(process.memory_info().rss for process in serve_processes(REPLICA, PROXY))


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[str], address: str) -> None:
    until_s = time.monotonic() + START_S
    # Asked for and not read from its output: peers print what they like when they are ready.
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server was not ready within {START_S:g} s")
