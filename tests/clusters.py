"""Ray clusters on this machine, started with ``ray start`` as users start them."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from esmeray.common.publishing import exclusive

REPOSITORY = Path(__file__).resolve().parent.parent
RAY = str(Path(sys.executable).with_name("ray"))
TOKEN = "test-" + "0" * 59
START_TIMEOUT_S = 120
MARK = "ESMERAY_MACHINES"
NETWORK = "10.231.77."

Restore = Callable[[], Any] | None
"""A call that ends a fault, or None if nothing has to be restored."""


class StartedCluster:
    """A local Ray cluster: a head node and further nodes, each with its own number of CPU cores.

    Attributes:
        environment: variables of a shell on the head node: Ray finds the token and the cluster from them.
        address: HOST:PORT.
        client: ray://HOST:PORT of the head.
        nodes: one ``ray start --block`` per node; the node's processes end with it.
    """

    def __init__(self, mode: str = "token") -> None:
        # The paths of Ray's sockets, which are in this folder, must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self._mode = mode
        ours = {
            "RAY_TMPDIR": str(self._folder),
            "RAY_AUTH_TOKEN": TOKEN,
            # Ray (2.60) gives a node's processes 15 to 30 s, too little while tests keep the machine busy.
            "RAY_agent_register_timeout_ms": "100000",
            "RAY_raylet_start_wait_time_s": "100",
            "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "100",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "100",
            # Variables of mpirun and torchrun, as on nodes that these started: a run's workers must ignore them.
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "7",
            "OMPI_COMM_WORLD_LOCAL_RANK": "6",
            "PMI_RANK": "1",
            "AZUREML_EXPERIMENT_ID": "1",
            "SM_TRAINING_ENV": "{}",
            "ACCELERATE_USE_FSDP": "true",
            "RANK": "5",
            "LOCAL_RANK": "3",
            "WORLD_SIZE": "7",
            "MASTER_ADDR": "192.0.2.1",
            "MASTER_PORT": "1",
            # Workers that Ray prestarts have no runtime environment, so no run could use them.
            "RAY_prestart_worker_first_driver": "0",
        }
        inherited = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_MODE")}
        self.environment = inherited | ours
        self.nodes: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._client_port = probe.getsockname()[1]
        self.client = f"ray://127.0.0.1:{self._client_port}"

    @property
    def address(self) -> str:
        return (self._folder / "ray" / "ray_current_cluster").read_text()

    def add(self, cpus: int, *wrapper: str, gpus: int = 0) -> subprocess.Popen[bytes]:
        """Start a node, the head first, and wait until it is ready; ``wrapper``: a command that runs ``ray start``."""
        head = ["--head", "--port=0", f"--ray-client-server-port={self._client_port}", "--include-dashboard=false"]
        joined = ["--address", self.address] if self.nodes else head
        log = self._folder / f"node-{len(self.nodes)}.log"
        size = [f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--object-store-memory={100 * 1024 * 1024}"]
        command = [*wrapper, RAY, "start", "--block", *size, *joined]
        # One at a time: two nodes that start at once may choose the same port.
        with exclusive(Path(tempfile.gettempdir()) / f"esmeray-cluster-{os.getuid()}"):
            with log.open("wb") as output:
                environment = self.environment | {"RAY_AUTH_MODE": self._mode}
                node = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            self.nodes.append(node)
            deadline = time.monotonic() + START_TIMEOUT_S
            while "will now block" not in log.read_text():  # then its address has been written
                assert node.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        return node

    def processes(self, node: subprocess.Popen[bytes], name: str = "") -> list[psutil.Process]:
        """A node's processes whose names contain ``name``."""
        with suppress(psutil.NoSuchProcess):
            family = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
            return [process for process in family if name in process.name()]
        return []

    def lose(self, node: subprocess.Popen[bytes], name: str = "") -> None:
        """Kill a node's processes whose names contain ``name``; by default all, as if the machine were switched off."""
        for process in self.processes(node, name):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def drain(self, node: subprocess.Popen[bytes], within_s: int) -> None:
        """Announce the end of a node, as an autoscaler does for a preempted machine."""
        commands = [" ".join(process.cmdline()) for process in psutil.Process(node.pid).children()]
        (name,) = set(re.findall(r"--node[-_]id=(\w+)", " ".join(commands)))
        program = [RAY, "drain-node", f"--address={self.address}", f"--node-id={name}"]
        why = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=preempted"]
        environment = self.environment | {"RAY_AUTH_MODE": self._mode}
        subprocess.run([*program, *why, f"--deadline-remaining-seconds={within_s}"], env=environment, check=True)

    def close(self) -> None:
        for node in self.nodes:
            if node.poll() is None:
                self.lose(node)
            node.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def started_cluster(*cpus: int, gpus: int = 0, mode: str = "token") -> Iterator[StartedCluster]:
    """Run a cluster while the block runs: a node per number of ``cpus``, with ``gpus`` simulated GPUs each."""
    cluster = StartedCluster(mode)
    try:
        for count in cpus:
            cluster.add(count, gpus=gpus)
        yield cluster
    finally:
        cluster.close()


def python(program: str, *arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a process of its own, in the repository's root."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def shell(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True)


class Machines:
    """Two nodes of a Ray cluster on this machine, the second in its own network namespace, and a disk of 64 MiB."""

    def __init__(self) -> None:
        self.cluster: StartedCluster | None = None
        self.disk = Path(tempfile.mkdtemp(prefix="chaos-disk-"))
        self._link, inside = f"cho{os.getpid()}", f"chi{os.getpid()}"
        os.environ[MARK] = str(self.disk)  # all child processes inherit it
        # The network of a killed run has the same addresses.
        networks = subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout
        for pid in re.findall(r"^cho(\d+)", networks, re.MULTILINE):
            if not psutil.pid_exists(int(pid)):
                shell(f"ip netns del cho{pid}")
        apart, ours = f"ip -n {self._link}", f"dev {self._link}"
        shell(f"mount -t tmpfs -o size=64m chaos {self.disk}", f"ip netns add {self._link}")
        shell(f"ip link add {self._link} type veth peer name {inside} netns {self._link}")
        shell(f"ip addr add {NETWORK}1/24 {ours}", f"ip link set {ours} up", f"{apart} link set lo up")
        shell(f"{apart} addr add {NETWORK}2/24 dev {inside}", f"{apart} link set {inside} up")

    def restore(self) -> StartedCluster:
        """Return the cluster after replacing lost nodes."""
        if self.cluster is not None and self.cluster.nodes[0].poll() is not None:
            self.cluster.close()
            self.cluster = None
        self.cluster = self.cluster or StartedCluster()
        self.cluster.nodes = [node for node in self.cluster.nodes if node.poll() is None]
        for number in range(1 + len(self.cluster.nodes), 3):
            within = ["ip", "netns", "exec", self._link] if number == 2 else []
            self.cluster.add(1, *within, "sh", "-c", f'exec "$@" --node-ip-address={NETWORK}{number}', "sh")
        return self.cluster

    def find(self, name: str) -> tuple[int, float] | None:
        """The pid of a process with this name, and the current time; None if there is no such process."""
        nodes = self.cluster.nodes if self.cluster else []
        pids = [process.pid for node in nodes for process in self.cluster.processes(node, name)]
        return (pids[0], time.monotonic()) if pids else None

    def cut(self) -> Restore:
        """Drop every packet of the second node. The returned call replaces the node."""
        shell(f"iptables -I INPUT -i {self._link} -j DROP")
        return lambda: (shell(f"iptables -D INPUT -i {self._link} -j DROP"), self.kill("", 1)())

    def kill(self, name: str, number: int) -> Restore:
        """Kill processes of a node. The returned call starts another node."""
        self.cluster.lose(self.cluster.nodes[number], name)
        if not name:
            self.cluster.nodes[number].wait()
        return self.restore

    def take_away(self) -> Restore:
        """Announce the end of the second node. The returned call kills it and starts another."""
        self.cluster.drain(self.cluster.nodes[1], within_s=15)
        return lambda: self.kill("", 1)()

    def fill(self) -> Restore:
        filler = self.disk / "filler"
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}"], check=False, capture_output=True)
        return lambda: filler.unlink(missing_ok=True)

    def protect(self) -> Restore:
        """Make the disk read-only for files that are opened from now on."""
        shell(f"mount --bind {self.disk} {self.disk}", f"mount -o remount,bind,ro {self.disk}")
        return lambda: shell(f"umount --lazy {self.disk}")

    def close(self) -> list[str]:
        """Close the cluster and return a line per process that is still running."""
        if self.cluster is not None:
            self.cluster.close()
        shell(f"ip link del {self._link}", f"ip netns del {self._link}", f"umount --lazy {self.disk}")
        self.disk.rmdir()
        running = psutil.process_iter(["environ"])
        return [f"left: {p}" for p in running if (p.info["environ"] or {}).get(MARK) == str(self.disk)]
