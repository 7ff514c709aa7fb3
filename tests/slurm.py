"""A Slurm job on two nodes, started by docker/slurm.sh with a simulated srun that runs both on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.clusters import REPOSITORY

OF_USER = [] if os.getuid() == 0 else ["--map-root-user"]
APART = ["unshare", "--mount", *OF_USER]
"""Command that runs a program in its own mount namespace, as on another machine."""
HAS_MOUNTS = subprocess.run([*APART, "true"], check=False).returncode == 0
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, tempfile
from pathlib import Path
sys.path.insert(0, "{REPOSITORY}")
from esmeray.common.publishing import exclusive

nodes = []
signal.signal(signal.SIGTERM, lambda *_: [node.terminate() for node in nodes])
options = [word for word in sys.argv[1:] if word.startswith("--")]
assert "--nodes=2" in options and "--ntasks-per-node=1" in options and "--cpus-per-task=1" in options
# One after the other: two that start at once may choose the same port.
with exclusive(Path(tempfile.gettempdir()) / f"esmeray-cluster-{{os.getuid()}}"):
    for number, wrapper in enumerate([[], {APART if HAS_MOUNTS else []}]):
        environment = os.environ | {{"SLURM_NODEID": str(number)}}
        # Its dashboard takes longer to start than all else.
        command = [word.replace("--head", "--head --include-dashboard=false") for word in sys.argv[1 + len(options) :]]
        nodes.append(subprocess.Popen([*wrapper, *command], env=environment, stdout=subprocess.PIPE, text=True))
        for line in nodes[-1].stdout:
            print(line, end="", flush=True)
            if "Ray runtime started" in line:
                break
sys.exit(max(abs(node.wait()) for node in nodes))
"""
COMMAND = """
import json, os, pathlib, signal, sys
import ray
from esmeray.cluster.connection import capacity, connected, hardware, worker_environment
from esmeray.cluster.placement import Workers
from esmeray.cluster.section import RaySection

class Probe:
    def has_the_code(self):
        import esmeray

        package = pathlib.Path(esmeray.__file__).parent
        return ["runtime_resources" in package.parts, (package / "train_config" / "loading.py").exists()]

with connected(RaySection()):
    probe = ray.remote(Probe).options(num_cpus=1, runtime_env=worker_environment()).remote()
    reply = [hardware(), ray.get(probe.has_the_code.remote())]
    reply.append(str(capacity(Workers(2, 1, use_gpu=False, sizes=(1, 2)))))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
environment = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
print(json.dumps([reply, environment]), flush=True)
signal.pause()
"""


class SlurmJob(NamedTuple):
    """A running job.

    Attributes:
        reply: reply of the job's command: the nodes, whether they have the code, and their free capacity.
        environment: environment variables of a shell on the first node.
        inside: command that runs a program in the second node's mount namespace.
    """

    reply: list[Any]
    environment: dict[str, str]
    inside: list[str]


@contextmanager
def started_job(folder: Path) -> Iterator[SlurmJob]:
    """Run the job while the block runs, with ``folder`` as home; then check that SIGTERM ends all of its processes."""
    srun = folder / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_AUTH", "RAY_ADDRESS"))}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as sockets:  # paths of sockets must be short
        job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "1", "SLURM_JOB_ID": "5", "RAY_PORT": str(port)}
        job |= {"RAY_TMPDIR": sockets, "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION": "0.01"}
        path = f"{srun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        user = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "HOME": str(folder)}
        command = [REPOSITORY / "docker" / "slurm.sh", "python", "-c", COMMAND]
        streams = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        batch = subprocess.Popen(command, cwd=folder, env=inherited | job | user, **streams)
        try:
            line = batch.stdout.readline()
            assert line, (folder / "ray-5.log").read_text()
            reply, environment = json.loads(line)
            started = psutil.Process(batch.pid).children(recursive=True)
            (node,) = [p for p in started if p.name() == "raylet" and p.environ()["SLURM_NODEID"] == "1"]
            user = ["--user", "--preserve-credentials"] if OF_USER else []
            inside = ["nsenter", f"--target={node.pid}", *user, "--mount"]
            yield SlurmJob(reply, inherited | environment, inside)
        finally:
            batch.send_signal(signal.SIGTERM)
            code = batch.wait(60)
    assert code == 7 and "Ray runtime started" in (folder / "ray-5.log").read_text()
    # cmdline is None if a process has ended meanwhile.
    left = [p for p in psutil.process_iter(["cmdline"]) if sockets in " ".join(p.info["cmdline"] or [])]
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive
    assert not (folder / ".ray").exists()
