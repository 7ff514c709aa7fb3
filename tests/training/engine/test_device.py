"""One place says which device a worker has, sets torch up for it, and notices what was left elsewhere."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from common.errors import ConfigError
from dataset.packed_batch import PackedBatch
from dataset.tokens.esm import pack_sequences
from tests.runs import run_folder, tiny_config
from train_config.loading import load_config
from train_config.schema import TrainingSection
from training.engine.context import WorkerContext
from training.engine.device import PlacementError, apply_device_settings, check_placement, choose_device
from training.loop.worker import train_worker

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def torch_settings(monkeypatch):
    """torch's switches are put back afterwards."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    precision = torch.get_float32_matmul_precision()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    for name in ("benchmark", "allow_tf32"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision(precision)


class Model(nn.Module):
    """Two parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.register_buffer("mean", torch.zeros(2))


@pytest.fixture
def batch() -> PackedBatch:
    return pack_sequences(["MKT", "GAV"])


def test_rank_takes_its_own_gpu_where_there_is_one_and_the_cpu_else(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(3) == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(3) == CPU


def test_model_and_batch_on_the_device_pass(batch):
    check_placement(Model(), batch, CPU)
    check_placement(Model(), batch, torch.device("cpu", 0))
    check_placement(Model().to(ELSEWHERE), batch.to(ELSEWHERE), ELSEWHERE)


def move_a_field(batch):
    return replace(batch, cu_seqlens=batch.cu_seqlens.to(ELSEWHERE))


@pytest.mark.parametrize(
    ("move", "name"),
    [
        (lambda model: model.second.to(ELSEWHERE), "parameter second.weight"),
        (lambda model: setattr(model, "mean", model.mean.to(ELSEWHERE)), "buffer mean"),
        (None, "batch field cu_seqlens"),
    ],
    ids=["parameter", "buffer", "field"],
)
def test_what_was_left_elsewhere_is_named_with_both_devices(batch, move, name):
    model = Model()
    if move is None:
        batch = move_a_field(batch)
    else:
        move(model)
    with pytest.raises(PlacementError, match=f"^{name} is on meta, but the device of this worker is cpu: move it"):
        check_placement(model, batch, CPU)


def test_parameters_that_zero_3_took_away_may_leave_an_empty_one_anywhere(batch):
    model = Model()
    model.first.weight = nn.Parameter(torch.empty(0, device=ELSEWHERE))
    check_placement(model, batch, CPU)


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


def test_batch_that_stayed_elsewhere_ends_the_run_at_the_first_step(process_group, store_path, tmp_path, monkeypatch):
    monkeypatch.setattr(PackedBatch, "to", lambda self, device, non_blocking=False: move_a_field(self))
    config = tiny_config(tmp_path, model={"task": "masked_lm"})
    with pytest.raises(PlacementError, match="batch field cu_seqlens is on meta"):
        train_worker(config, WorkerContext(), store_path)
    outcome = run_folder(config).read_outcome()
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
