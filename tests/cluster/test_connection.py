import importlib.metadata
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from esmeray.cluster.placement import Capacity
from tests.clusters import StartedCluster, python, started_cluster
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


@pytest.mark.slow
def test_code_goes_along_to_the_machines_of_a_cluster_and_what_others_leave_of_them_counts(two_machines):
    done = python(TWO_MACHINES, two_machines.client, environment=two_machines.environment)
    assert done.returncode == 0, done.stderr
    has = "the cluster has 2 CPU cores and 0 GPUs on 2 machines"
    held = [str(Capacity(now, 2, has)) for now in (1, 2)]
    assert done.stdout.splitlines() == ["2 x 1 CPU cores, 0 GPUs", "[True, True]", *held]


APART = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
"""Runs a program that has its own view of mounted folders, as another machine has."""
CONNECT = """
import json, sys
from pathlib import Path
from esmeray.cluster.connection import connected
from esmeray.common.errors import ResourceError
from esmeray.cluster.section import RaySection

try:
    with connected(RaySection(**json.loads(sys.argv[1])), *map(Path, sys.argv[2:])):
        print("connected")
except ResourceError as error:
    print(str(error).partition(" You can")[0])
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
    environment = two_machines.environment | {"RAY_JOB_CONFIG_JSON_ENV_VAR": job}
    done = python(CONNECT, "{}", str(shared), environment=environment)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1), done
    assert "has torch 9.9 (2.13.0" in done.stdout
    assert "other code of Esmeray" in done.stdout
    assert f"another folder at {shared}" in done.stdout


def test_a_local_cluster_whose_port_is_taken_is_refused_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        section = json.dumps({"address": "local", "dashboard_port": port})
        done = python(CONNECT, section, environment={**os.environ})
    refused = f"no Ray cluster can be started here (Failed to bind to 127.0.0.1:{port} because it's already occupied."
    assert (done.stdout, done.stderr) == (f"ray.address: {refused}\n", "")
