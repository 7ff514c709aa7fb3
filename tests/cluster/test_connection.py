"""Missing resources of a cluster are reported in one line."""

import importlib.metadata
import json
import subprocess
from pathlib import Path

import pytest

from esmeray.common.processor import cpu_computes_bf16
from tests.clusters import python
from tests.conftest import REPOSITORY
from tests.slurm import HAS_MOUNTS, SlurmJob

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
ERRORS = REPOSITORY / "esmeray" / "common" / "errors.py"


PRECISION = """
import sys
from pathlib import Path
from esmeray.cluster.connection import connected, default_precision
from esmeray.cluster.section import RaySection
from esmeray.common import processor

here, there = map(Path, sys.argv[1:])
processor.CPU_INFO = here  # of this process, which computes nothing
with connected(RaySection()):
    for own, other in (("avx2", "avx512_bf16"), ("amx_bf16", "avx2"), ("avx2", "amx_bf16")):
        here.write_text(f"flags : {own}")
        there.write_text(f"flags : {other}")
        print(default_precision(on_cuda=False), default_precision(on_cuda=True))
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MOUNTS, reason="needs own mounts")
def test_the_default_precision_is_one_that_every_node_has_instructions_for(slurm_job: SlurmJob, tmp_path: Path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.touch()
    there.touch()
    subprocess.run([*slurm_job.inside, "mount", "--bind", there, "/proc/cpuinfo"], check=True)
    done = python(PRECISION, str(here), str(there), environment=slurm_job.environment)
    subprocess.run([*slurm_job.inside, "umount", "/proc/cpuinfo"], check=True)
    both = "bf16" if cpu_computes_bf16() else "fp32"  # the first node is this machine
    assert done.stdout.splitlines() == [f"{both} bf16", "fp32 bf16", f"{both} bf16"], done


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MOUNTS, reason="needs own mounts")
def test_what_another_machine_lacks_is_one_line(slurm_job: SlurmJob, tmp_path: Path):
    shared, metadata, code = tmp_path / "shared", tmp_path / "METADATA", tmp_path / "errors.py"
    shared.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    code.write_text((ERRORS).read_text() + "\n")
    (installed,) = [file for file in importlib.metadata.files("torch") if file.match("*.dist-info/METADATA")]
    mounts = {
        installed.locate(): metadata,
        ERRORS: code,
        shared: tmp_path / "other",
    }
    (tmp_path / "other").mkdir()
    for target, source in mounts.items():
        subprocess.run([*slurm_job.inside, "mount", "--bind", source, target], check=True)
    # A job that uses the code installed on the nodes.
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"working_dir": str(shared)}})}
    done = python(CONNECT, "{}", str(shared), environment=slurm_job.environment | job)
    subprocess.run([*slurm_job.inside, "umount", *mounts], check=True)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1), done
    assert "has torch 9.9 (this machine: 2.13.0" in done.stdout
    assert "different Esmeray code (to send yours, use 'ray" in done.stdout
    assert f"another folder at {shared}" in done.stdout
