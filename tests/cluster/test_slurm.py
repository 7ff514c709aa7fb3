"""The Slurm script. tests/slurm.py checks that a signal ends the job with its command's exit code."""

import pytest

from esmeray.cluster.placement import Capacity
from tests.slurm import SlurmJob


@pytest.mark.slow
def test_a_slurm_job_has_its_own_nodes_token_and_code(slurm_job: SlurmJob):
    held = Capacity(1, 2, "the cluster has 2 CPU cores and 0 GPUs on 2 machines")
    assert slurm_job.reply == ["2 x 1 CPU cores, 0 GPUs", [True, True], str(held)]
    assert slurm_job.environment["RAY_AUTH_MODE"] == "token"
