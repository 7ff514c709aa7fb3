import os
import subprocess
import sys

import pytest

from cluster.placement import Capacity
from tests.clusters import started_cluster
from tests.conftest import REPOSITORY

TWO_MACHINES = """
import sys
import ray
from train_config.schema import RaySection
from cluster.connection import capacity, connected, hardware, worker_environment
from cluster.placement import Workers

class Probe:
    def has_the_code(self):
        import pathlib
        here = pathlib.Path.cwd()
        return ["runtime_resources" in here.parts, (here / "train_config" / "schema.py").exists()]

with connected(RaySection()):
    print(hardware())
    probe = ray.remote(Probe).options(num_cpus=1, runtime_env=worker_environment()).remote()
    print(ray.get(probe.has_the_code.remote()))
    print(capacity(Workers(2, 1, use_gpu=False, sizes=(1, 2))))
with connected(RaySection(address=sys.argv[1])):
    print(capacity(Workers(2, 1, use_gpu=False, sizes=(1, 2))))
"""


@pytest.mark.slow
def test_code_goes_along_to_the_machines_of_a_cluster_and_what_others_leave_of_them_counts():
    with started_cluster(1, 1) as cluster:
        program = [sys.executable, "-c", TWO_MACHINES, cluster.client]
        done = subprocess.run(
            program, cwd=REPOSITORY, env=cluster.environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    has = "the cluster has 2 CPU cores and 0 GPUs on 2 machines"
    held = [str(Capacity(now, 2, has)) for now in (1, 2)]
    assert done.stdout.splitlines() == ["2 x 1 CPU cores, 0 GPUs", "[True, True]", *held]


LOCAL_RUN = """
import socket
import psutil
import ray
from ray._raylet import AuthenticationMode, get_authentication_mode
from train_config.schema import RaySection
from cluster.connection import connected
from cluster.process_group import addresses, listen
from common.errors import ResourceError

with socket.create_server(("127.0.0.1", 0)) as taken:
    try:
        with connected(RaySection(address="local", dashboard_port=taken.getsockname()[1])):
            print("never")
    except ResourceError as error:
        print(str(error).partition(" You can")[0].replace(str(taken.getsockname()[1]), "PORT"))

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
    refused = "no Ray cluster can be started here (Failed to bind to 127.0.0.1:PORT because it's already occupied."
    assert done.stdout.splitlines() == [f"ray.address: {refused}", "True True", "True {'127.0.0.1'}"]
    assert not (tmp_path / ".ray").exists()
