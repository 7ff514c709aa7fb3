"""Weight decay reaches matrices alone, and every trainable parameter stands in one group."""

from __future__ import annotations

import pytest

from model.parameter_groups import parameter_groups
from model.registry import build_model
from tests.model.support import tiny_section


@pytest.mark.parametrize("task", ["autoencoder", "masked_lm"])
@pytest.mark.parametrize("frozen", [True, False])
def test_each_trainable_parameter_stands_in_one_group(task, frozen):
    model = build_model(tiny_section(task, frozen=frozen), seed=0)
    grouped = [id(parameter) for group in parameter_groups(model, 0.1) for parameter in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def test_biases_and_norms_do_not_decay():
    model = build_model(tiny_section("masked_lm"), seed=0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decay, no_decay = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    spared = {names[id(parameter)] for parameter in no_decay["params"]}
    assert all(name.endswith("bias") or "norm" in name.lower() for name in spared)
    assert not any("norm" in names[id(parameter)].lower() for parameter in decay["params"])


def test_an_empty_group_is_left_out():
    groups = parameter_groups(build_model(tiny_section(frozen=True), seed=0), 0.1)
    assert [group["name"] for group in groups] == ["decay"]
