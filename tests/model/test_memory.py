"""Memory estimates follow the formulas of ZeRO and count what a built model has."""

from __future__ import annotations

import pytest

from model.memory import count_parameters, estimate_memory
from model.registry import build_model
from tests.model.support import save_network, tiny_section
from train_config.schema import BackboneSection, ModelSection


@pytest.mark.parametrize("task", ["autoencoder", "masked_lm"])
@pytest.mark.parametrize("frozen", [True, False])
def test_the_count_is_that_of_the_built_model(task, frozen):
    section = tiny_section(task, frozen=frozen)
    parameters = list(build_model(section, seed=0).parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    assert count_parameters(section) == (sum(p.numel() for p in parameters), trainable)


def test_a_folder_is_counted_from_its_config(tmp_path):
    save_network(tmp_path / "network")
    (tmp_path / "network" / "model.safetensors").unlink()
    assert count_parameters(ModelSection(task="masked_lm", backbone=BackboneSection(source=str(tmp_path / "network"))))


@pytest.mark.parametrize(
    ("name", "billions"),
    [("esm2_t6_8M", 0.0075), ("esm2_t12_35M", 0.0335), ("esm2_t30_150M", 0.148), ("esm2_t33_650M", 0.651),
     ("esm2_t36_3B", 2.84), ("esm2_t48_15B", 15.13)],
)  # fmt: skip
def test_sizes_have_the_published_number_of_parameters(name, billions):
    total, _ = count_parameters(ModelSection(task="masked_lm", backbone=BackboneSection(source=name)))
    assert total / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"), [(0, 2, 2, 12), (1, 2, 2, 3), (2, 2, 0.5, 3), (3, 0.5, 0.5, 3)]
)
def test_mixed_precision_bytes_per_parameter_on_four_devices(stage, weights, gradients, optimizer):
    estimate = estimate_memory(count_parameters(tiny_section("masked_lm")), stage=stage, world_size=4, amp_dtype="bf16")
    assert estimate.parameter_bytes == pytest.approx(weights * estimate.parameters, abs=1)
    assert estimate.gradient_bytes == pytest.approx(gradients * estimate.trainable_parameters, abs=1)
    assert estimate.optimizer_bytes == pytest.approx(optimizer * estimate.trainable_parameters, abs=1)
    assert estimate.device_bytes == estimate.parameter_bytes + estimate.gradient_bytes + estimate.optimizer_bytes


def test_fp32_takes_sixteen_bytes_a_parameter_on_one_device():
    estimate = estimate_memory(count_parameters(tiny_section("masked_lm")), stage=2, world_size=1, amp_dtype="none")
    assert (estimate.parameter_bytes, estimate.gradient_bytes) == (
        4 * estimate.parameters, 4 * estimate.trainable_parameters,
    )  # fmt: skip
    assert estimate.optimizer_bytes == 8 * estimate.trainable_parameters


def test_offloaded_optimizer_state_is_in_host_memory():
    section = tiny_section("masked_lm")
    here = estimate_memory(count_parameters(section), stage=2, world_size=2, amp_dtype="bf16")
    settings = {"stage": 2, "world_size": 2, "amp_dtype": "bf16", "offload_optimizer": True}
    offloaded = estimate_memory(count_parameters(section), **settings)
    assert (offloaded.optimizer_bytes, offloaded.host_optimizer_bytes) == (0, here.optimizer_bytes)
