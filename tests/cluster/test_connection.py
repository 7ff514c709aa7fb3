import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from esmeray.cluster.placement import Capacity
from tests.clusters import StartedCluster, started_cluster
from tests.conftest import REPOSITORY

TWO_MACHINES = """
import sys
import ray
from esmeray.cluster.section import RaySection
from esmeray.cluster.connection import capacity, connected, hardware, worker_environment
from esmeray.cluster.placement import Workers

class Probe:
    def has_the_code(self):
        import pathlib
        here = pathlib.Path.cwd()
        return ["runtime_resources" in here.parts, (here / "train_config" / "loading.py").exists()]

with connected(RaySection()):
    print(hardware())
    probe = ray.remote(Probe).options(num_cpus=1, runtime_env=worker_environment()).remote()
    print(ray.get(probe.has_the_code.remote()))
    print(capacity(Workers(2, 1, use_gpu=False, sizes=(1, 2))))
with connected(RaySection(address=sys.argv[1])):
    print(capacity(Workers(2, 1, use_gpu=False, sizes=(1, 2))))
"""


@pytest.fixture(scope="module")
def two_machines() -> Iterator[StartedCluster]:
    with started_cluster(1, 1) as cluster:
        yield cluster


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_code_goes_along_to_the_machines_of_a_cluster_and_what_others_leave_of_them_counts(two_machines):
    done = run(TWO_MACHINES, two_machines.client, **two_machines.environment)
    assert done.returncode == 0, done.stderr
    has = "the cluster has 2 CPU cores and 0 GPUs on 2 machines"
    held = [str(Capacity(now, 2, has)) for now in (1, 2)]
    assert done.stdout.splitlines() == ["2 x 1 CPU cores, 0 GPUs", "[True, True]", *held]


APART = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
"""Runs a program that has its own view of mounted folders, as another machine has."""
CONNECT = """
import sys
from pathlib import Path
from esmeray.cluster.connection import connected
from esmeray.common.errors import ResourceError
from esmeray.cluster.section import RaySection

try:
    with connected(RaySection(), Path(sys.argv[1])):
        print("connected")
except ResourceError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(subprocess.run([*APART, "true"], check=False).returncode != 0, reason="needs own mounts")
def test_what_a_third_machine_lacks_is_one_line(two_machines, tmp_path: Path):
    shared, metadata, code = tmp_path / "shared", tmp_path / "METADATA", tmp_path / "errors.py"
    shared.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    code.write_text((REPOSITORY / "common" / "errors.py").read_text() + "\n")
    (installed,) = [file for file in importlib.metadata.files("torch") if file.match("*.dist-info/METADATA")]
    mounts = f"mount --bind {metadata} {installed.locate()} && mount --bind {code} {REPOSITORY}/common/errors.py"
    two_machines.add(1, *APART, "sh", "-c", f'{mounts} && mount -t tmpfs none {shared} && exec "$@"', "sh")
    # A job whose code is the nodes' own.
    job = json.dumps({"runtime_env": {"working_dir": str(shared)}})
    done = run(CONNECT, str(shared), **two_machines.environment | {"RAY_JOB_CONFIG_JSON_ENV_VAR": job})
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1), done
    assert "has torch 9.9 (2.13.0" in done.stdout
    assert "other code of Esmeray" in done.stdout
    assert f"another folder at {shared}" in done.stdout


TAKEN_PORT = """
import sys
from esmeray.cluster.section import RaySection
from esmeray.cluster.connection import connected
from esmeray.common.errors import ResourceError

try:
    with connected(RaySection(address="local", dashboard_port=int(sys.argv[1]))):
        print("never")
except ResourceError as error:
    print(str(error).partition(" You can")[0])
"""


def test_a_local_cluster_whose_port_is_taken_is_refused_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(TAKEN_PORT, str(port), **os.environ)
    refused = f"no Ray cluster can be started here (Failed to bind to 127.0.0.1:{port} because it's already occupied."
    assert (done.stdout, done.stderr) == (f"ray.address: {refused}\n", "")
