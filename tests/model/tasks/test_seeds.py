"""Weights and losses of the tasks on residues depend on the seed alone."""

from __future__ import annotations

import pytest
import torch

from tests.model.support import build_model, masked_batch, random_sequences, tiny_section


@pytest.mark.parametrize("task", ["autoencoder", "masked_lm"])
def test_weights_depend_on_the_seed_and_leave_the_global_state_alone(task):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    model = build_model(tiny_section(task), seed=3)
    assert model.training
    first = model.state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    again = build_model(tiny_section(task), seed=3).state_dict()
    other = build_model(tiny_section(task), seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(("task", "loss"), [("autoencoder", 4.471039), ("masked_lm", 3.542034)])
def test_the_loss_at_a_fixed_seed_is_the_known_one(task, loss):
    """Guards numerics by identity: a change that should not alter results must not alter these (fp32, CPU)."""
    batch = masked_batch(random_sequences([40, 1, 25]), [0.3, 0.0, 0.5])
    model = build_model(tiny_section(task), seed=0)
    output = model(batch)
    assert (output.loss_sum / output.num_targets).item() == pytest.approx(loss, rel=1e-5)
