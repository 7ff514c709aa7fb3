import os
import subprocess
import sys

import pytest

from common.errors import ResourceError
from tests.conftest import REPOSITORY
from train_config.schema import RaySection
from training.launch.cluster import WATCHES, connected, missing_now
from training.launch.placement import Workers


def test_busy_cluster_is_told(ray_address):
    assert missing_now(Workers(count=1, cpus_each=1, use_gpu=False)) is None
    assert "waits" in missing_now(Workers(count=2, cpus_each=100, use_gpu=False))


TWO_MACHINES = """
import os
import ray
from ray.cluster_utils import Cluster
from train_config.schema import RaySection
from training.launch.cluster import WATCHES, connected, hardware, worker_environment

class Probe:
    def has_the_code(self):
        import pathlib
        here = pathlib.Path.cwd()
        return ["runtime_resources" in here.parts, (here / "train_config" / "schema.py").exists()]

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
with connected(RaySection(address=cluster.address)):
    print(hardware())
    assert WATCHES not in os.environ
    probe = ray.remote(Probe).options(runtime_env=worker_environment()).remote()
    print(ray.get(probe.has_the_code.remote()))
cluster.shutdown()
"""


@pytest.mark.slow
def test_code_goes_along_to_other_machines():
    # Local clusters of other tests set it.
    alone = {name: value for name, value in os.environ.items() if name != WATCHES}
    done = subprocess.run(
        [sys.executable, "-c", TWO_MACHINES], cwd=REPOSITORY, env=alone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["2 x 1 CPU cores, 0 GPUs", "[True, True]"]


def test_address_where_nothing_answers_is_one_line():
    with (
        pytest.raises(ResourceError, match=r"no Ray cluster can be used at 127\.0\.0\.1:1"),
        connected(RaySection(address="127.0.0.1:1")),
    ):
        pytest.fail("connected to nothing")
