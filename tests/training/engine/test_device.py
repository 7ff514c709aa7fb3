import os

import pytest
import torch

from common.errors import ConfigError
from train_config.loading import load_config
from train_config.schema import TrainingSection
from training.engine.device import apply_device_settings, choose_device


@pytest.fixture
def torch_settings(monkeypatch):
    deterministic = torch.are_deterministic_algorithms_enabled()
    precision = torch.get_float32_matmul_precision()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    for name in ("benchmark", "allow_tf32"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision(precision)


def test_rank_takes_its_own_gpu_where_there_is_one_and_the_cpu_else(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(3) == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(3) == torch.device("cpu")


def test_settings_reach_torch_and_a_cublas_workspace_of_the_user_s_choice_stays(torch_settings, monkeypatch):
    apply_device_settings(TrainingSection(tf32=True, cudnn_benchmark=True))
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.benchmark and torch.backends.cudnn.allow_tf32
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    apply_device_settings(TrainingSection(tf32=False, deterministic=True))
    assert torch.get_float32_matmul_precision() == "highest"
    assert not (torch.backends.cudnn.benchmark or torch.backends.cudnn.allow_tf32)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    apply_device_settings(TrainingSection(deterministic=True))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_timed_kernels_and_determinism_exclude_each_other():
    with pytest.raises(ConfigError, match="deterministic forbids: set one of them to false"):
        load_config(None, {("training", "deterministic"): "true", ("training", "cudnn_benchmark"): "true"})
