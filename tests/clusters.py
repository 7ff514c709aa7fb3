"""Ray clusters on this machine, started by the program ``ray start``, as users have them."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from common.publishing import exclusive

TOKEN = "test-" + "0" * 59
START_TIMEOUT_S = 120


class StartedCluster:
    """A head and further nodes of so many CPU cores each.

    Attributes:
        environment: of a shell on the head node, which has the token, and knows the cluster as the one of this machine.
        address: HOST:PORT.
        nodes: ``ray start --block`` of each; what it started ends with it.
    """

    def __init__(self, mode: str = "token") -> None:
        # Ray's sockets lie there, whose paths must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self._mode = mode
        ours = {"RAY_TMPDIR": str(self._folder), "RAY_AUTH_TOKEN": TOKEN}
        inherited = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_MODE")}
        self.environment = inherited | ours
        self.nodes: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return (self._folder / "ray" / "ray_current_cluster").read_text()

    def add(self, cpus: int, *wrapper: str) -> subprocess.Popen[bytes]:
        """Start a node, the head first, by a program if one is given, and wait until it is there."""
        joined = ["--address", self.address] if self.nodes else ["--head", "--port=0", "--include-dashboard=false"]
        log = self._folder / f"node-{len(self.nodes)}.log"
        command = [
            *wrapper,
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            f"--num-cpus={cpus}",
            *joined,
        ]
        memory = f"--object-store-memory={100 * 1024 * 1024}"
        # One after the other: two that start at once may choose the same port.
        with exclusive(Path(tempfile.gettempdir()) / f"esmeray-cluster-{os.getuid()}"):
            with log.open("wb") as output:
                node = subprocess.Popen(
                    [*command, memory],
                    env=self.environment | {"RAY_AUTH_MODE": self._mode},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self.nodes.append(node)
            deadline = time.monotonic() + START_TIMEOUT_S
            while "Ray runtime started" not in log.read_text():
                assert node.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        return node

    def lose(self, node: subprocess.Popen[bytes]) -> None:
        """End all of a node's processes at once, as a machine that is switched off."""
        for process in [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def close(self) -> None:
        for node in self.nodes:
            if node.poll() is None:
                self.lose(node)
            node.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def started_cluster(*cpus: int, mode: str = "token") -> Iterator[StartedCluster]:
    """A cluster of nodes with so many cores, for the length of the block."""
    cluster = StartedCluster(mode)
    try:
        for count in cpus:
            cluster.add(count)
        yield cluster
    finally:
        cluster.close()
