"""Weight decay reaches matrices alone, and every trainable parameter stands in one group."""

from __future__ import annotations

import pytest

from model.parameter_groups import RATE_SHARE, decayed_rates, parameter_groups
from tests.model.support import build_model, tiny_section


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


def test_each_layer_learns_at_a_share_of_the_rate_of_the_one_after_it():
    model = build_model(tiny_section("masked_lm"), seed=0)
    esm = model.backbone.model
    shares = decayed_rates([[esm.embeddings], *([layer] for layer in esm.encoder.layer)], 0.5)
    first, last = esm.encoder.layer[0].output.dense.weight, esm.encoder.layer[1].output.dense.weight
    assert (shares[esm.embeddings.word_embeddings.weight], shares[first], shares[last]) == (0.125, 0.25, 0.5)
    rates = {id(p): group[RATE_SHARE] for group in parameter_groups(model, 0.1, shares) for p in group["params"]}
    assert rates[id(first)] == 0.25
    assert rates[id(model.lm_head.dense.weight)] == 1.0


def test_groups_of_one_rate_are_those_without_rates():
    model = build_model(tiny_section("masked_lm"), seed=0)
    shares = dict.fromkeys(model.parameters(), 1.0)
    plain, same = parameter_groups(model, 0.1), parameter_groups(model, 0.1, shares)
    assert [group["name"] for group in same] == ["decay", "no_decay"]
    assert [[id(p) for p in g["params"]] for g in plain] == [[id(p) for p in g["params"]] for g in same]
