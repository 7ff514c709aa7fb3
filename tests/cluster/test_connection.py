import importlib.metadata
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.clusters import python, started_cluster
from tests.conftest import REPOSITORY

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
def test_what_another_machine_lacks_is_one_line(tmp_path: Path):
    shared, metadata, code = tmp_path / "shared", tmp_path / "METADATA", tmp_path / "errors.py"
    shared.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    code.write_text((REPOSITORY / "common" / "errors.py").read_text() + "\n")
    (installed,) = [file for file in importlib.metadata.files("torch") if file.match("*.dist-info/METADATA")]
    mounts = f"mount --bind {metadata} {installed.locate()} && mount --bind {code} {REPOSITORY}/common/errors.py"
    # A job whose code is the nodes' own.
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"working_dir": str(shared)}})}
    with started_cluster(1) as cluster:
        cluster.add(1, *APART, "sh", "-c", f'{mounts} && mount -t tmpfs none {shared} && exec "$@"', "sh")
        done = python(CONNECT, "{}", str(shared), environment=cluster.environment | job)
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
