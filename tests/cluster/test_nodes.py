"""A second node on which files are other ones than here, as on another machine."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters import started_cluster
from tests.conftest import REPOSITORY

APART = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
"""Runs a program that has its own view of mounted folders."""
CONNECT = """
import sys
from pathlib import Path
from cluster.connection import connected
from common.errors import ResourceError
from train_config.schema import RaySection

try:
    with connected(RaySection(), Path(sys.argv[1])):
        print("connected")
except ResourceError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(subprocess.run([*APART, "true"], check=False).returncode != 0, reason="needs own mounts")
def test_what_a_node_lacks_is_one_line(tmp_path: Path):
    shared, metadata, code = tmp_path / "shared", tmp_path / "METADATA", tmp_path / "errors.py"
    shared.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    code.write_text((REPOSITORY / "common" / "errors.py").read_text() + "\n")
    (installed,) = [file for file in importlib.metadata.files("torch") if file.match("*.dist-info/METADATA")]
    mounts = f"mount --bind {metadata} {installed.locate()} && mount --bind {code} {REPOSITORY}/common/errors.py"
    with started_cluster(1) as cluster:
        cluster.add(1, *APART, "sh", "-c", f'{mounts} && mount -t tmpfs none {shared} && exec "$@"', "sh")
        # A job whose code is the nodes' own.
        job = json.dumps({"runtime_env": {"working_dir": str(shared)}})
        done = subprocess.run(
            [sys.executable, "-c", CONNECT, str(shared)],
            cwd=REPOSITORY,
            env=cluster.environment | {"RAY_JOB_CONFIG_JSON_ENV_VAR": job},
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1), done
    assert "has torch 9.9 (2.13.0" in done.stdout
    assert "other code of Esmeray" in done.stdout
    assert f"another folder at {shared}" in done.stdout
