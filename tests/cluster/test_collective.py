"""A worker's environment has no variables of another launcher's processes."""

import os

import pytest

from esmeray.cluster.collective import prepare_environment


def test_variables_of_another_launcher_are_removed_and_no_others(monkeypatch: pytest.MonkeyPatch):
    launchers = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID", "AZUREML_EXPERIMENT_ID"}
    launchers |= {"SM_TRAINING_ENV", "TORCHELASTIC_USE_AGENT_STORE", "ACCELERATE_USE_FSDP", "FSDP_VERSION"}
    launchers |= {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    others = {"OMP_NUM_THREADS", "SLURM_JOB_ID", "ESMERAY_STORAGE", "SMALL", "NCCL_SOCKET_IFNAME"}
    for name in launchers | others:
        monkeypatch.setenv(name, "3")
    prepare_environment()
    assert others <= os.environ.keys() and not launchers & os.environ.keys()
