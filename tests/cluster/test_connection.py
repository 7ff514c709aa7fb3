import os
import subprocess
import sys

import pytest

from cluster.connection import WATCHES, missing_now
from cluster.placement import Workers
from tests.clusters import started_cluster
from tests.conftest import REPOSITORY


def test_busy_cluster_is_told(ray_address):
    assert missing_now(Workers(count=1, cpus_each=1, use_gpu=False)) is None
    assert "waits" in missing_now(Workers(count=2, cpus_each=100, use_gpu=False))


TWO_MACHINES = """
import os
import ray
from train_config.schema import RaySection
from cluster.connection import WATCHES, connected, hardware, worker_environment

class Probe:
    def has_the_code(self):
        import pathlib
        here = pathlib.Path.cwd()
        return ["runtime_resources" in here.parts, (here / "train_config" / "schema.py").exists()]

with connected(RaySection()):
    print(hardware())
    assert WATCHES not in os.environ
    probe = ray.remote(Probe).options(runtime_env=worker_environment()).remote()
    print(ray.get(probe.has_the_code.remote()))
"""


@pytest.mark.slow
def test_code_goes_along_to_the_machines_of_the_cluster_that_was_started_here():
    with started_cluster(1, 1) as cluster:
        # Local clusters of other tests set it.
        alone = {name: value for name, value in cluster.environment.items() if name != WATCHES}
        program = [sys.executable, "-c", TWO_MACHINES]
        done = subprocess.run(program, cwd=REPOSITORY, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 x 1 CPU cores, 0 GPUs", "[True, True]"]


LOCAL_RUN = """
import psutil
import ray
from ray._raylet import AuthenticationMode, get_authentication_mode
from train_config.schema import RaySection
from cluster.connection import connected
from cluster.process_group import addresses, listen

with connected(RaySection(address="local")) as dashboard:
    print(get_authentication_mode() == AuthenticationMode.TOKEN, "ray get-auth-token --generate" in dashboard)
    listen(addresses([ray.util.get_node_ip_address()] * 2)[0], 2)
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = [each for process in processes for each in process.net_connections() if each.status == "LISTEN"]
    print(len(listening) > 5, {each.laddr.ip.removeprefix("::ffff:") for each in listening})
"""


@pytest.mark.slow
def test_a_local_cluster_has_a_token_that_it_leaves_nowhere_and_listens_on_this_machine_alone(tmp_path):
    alone = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment = alone | {"HOME": str(tmp_path)}
    program = [sys.executable, "-c", LOCAL_RUN]
    done = subprocess.run(program, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["True True", "True {'127.0.0.1'}"]
    assert not (tmp_path / ".ray").exists()
