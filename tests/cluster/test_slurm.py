"""The script for Slurm, with an srun that starts the nodes on this machine."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from esmeray.cluster.placement import Capacity
from tests.conftest import REPOSITORY

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
    for number in range(2):
        environment = os.environ | {{"SLURM_NODEID": str(number)}}
        # Its dashboard takes longer to start than all else.
        command = [word.replace("--head", "--head --include-dashboard=false") for word in sys.argv[1 + len(options) :]]
        nodes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        for line in nodes[-1].stdout:
            print(line, end="", flush=True)
            if "Ray runtime started" in line:
                break
sys.exit(max(abs(node.wait()) for node in nodes))
"""
COMMAND = """
import pathlib, signal, sys
import ray
from esmeray.cluster.connection import capacity, connected, hardware, worker_environment
from esmeray.cluster.placement import Workers
from esmeray.cluster.section import RaySection

class Probe:
    def has_the_code(self):
        here = pathlib.Path.cwd()
        return ["runtime_resources" in here.parts, (here / "train_config" / "loading.py").exists()]

with connected(RaySection()):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print(hardware())
    probe = ray.remote(Probe).options(num_cpus=1, runtime_env=worker_environment()).remote()
    print(ray.get(probe.has_the_code.remote()))
    print(capacity(Workers(2, 1, use_gpu=False, sizes=(1, 2))), flush=True)
    signal.pause()
"""


@pytest.mark.slow
def test_a_slurm_job_has_its_nodes_a_token_of_its_own_and_the_exit_code_and_signals_of_its_command(tmp_path: Path):
    """Its nodes get the code, and what others hold of them counts."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_AUTH", "RAY_ADDRESS"))}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as sockets:  # whose paths must be short
        job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "1", "SLURM_JOB_ID": "5", "RAY_PORT": str(port)}
        job |= {"RAY_TMPDIR": sockets, "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION": "0.01"}
        path = f"{srun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        user = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path)}
        command = [REPOSITORY / "docker" / "slurm.sh", "python", "-c", COMMAND]
        streams = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        batch = subprocess.Popen(command, cwd=tmp_path, env=inherited | job | user, **streams)
        said = [batch.stdout.readline() for _ in range(3)]
        held = Capacity(1, 2, "the cluster has 2 CPU cores and 0 GPUs on 2 machines")
        expected = f"2 x 1 CPU cores, 0 GPUs\n[True, True]\n{held}\n"
        assert "".join(said) == expected, (tmp_path / "ray-5.log").read_text()
        batch.send_signal(signal.SIGTERM)
        assert batch.wait(60) == 7
    assert "Ray runtime started" in (tmp_path / "ray-5.log").read_text()
    assert not (tmp_path / ".ray").exists()
    # None of a process that has ended meanwhile.
    started = [p for p in psutil.process_iter(["cmdline"]) if sockets in " ".join(p.info["cmdline"] or [])]
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
