"""The config's task becomes a model whose weights depend on the seed alone."""

from __future__ import annotations

import pytest
import torch

from model.tasks.autoencoder import ESM2Autoencoder
from model.tasks.base import TaskModel
from model.tasks.masked_lm import MaskedLM
from tests.model.support import build_model, masked_batch, random_sequences, tiny_section


@pytest.mark.parametrize(("task", "kind"), [("autoencoder", ESM2Autoencoder), ("masked_lm", MaskedLM)])
def test_a_task_name_gives_its_model(task, kind):
    model = build_model(tiny_section(task), seed=0)
    assert isinstance(model, kind) and isinstance(model, TaskModel) and model.training


@pytest.mark.parametrize("task", ["autoencoder", "masked_lm"])
def test_weights_depend_on_the_seed_and_leave_the_global_state_alone(task):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build_model(tiny_section(task), seed=3).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    again = build_model(tiny_section(task), seed=3).state_dict()
    other = build_model(tiny_section(task), seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_both_tasks_start_from_the_same_backbone():
    models = [build_model(tiny_section(task), seed=3) for task in ("autoencoder", "masked_lm")]
    one, other = (model.backbone.state_dict() for model in models)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("task", ["autoencoder", "masked_lm"])
def test_backbone_settings_reach_the_task(task):
    model = build_model(tiny_section(task, frozen=True), seed=0)
    assert model.backbone.frozen and not model.backbone.training
    model = build_model(tiny_section(task, checkpointing=True), seed=0)
    assert model.backbone.gradient_checkpointing


@pytest.mark.parametrize(("task", "loss"), [("autoencoder", 4.471039), ("masked_lm", 3.542034)])
def test_the_loss_at_a_fixed_seed_is_the_known_one(task, loss):
    """Guards numerics by identity: a change that should not alter results must not alter these (fp32, CPU)."""
    batch = masked_batch(random_sequences([40, 1, 25]), [0.3, 0.0, 0.5])
    model = build_model(tiny_section(task), seed=0)
    output = model(batch)
    assert (output.loss_sum / output.num_targets).item() == pytest.approx(loss, rel=1e-5)
