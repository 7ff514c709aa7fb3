"""Every trainable parameter is in one group, by weight decay (matrices only) and learning rate."""

import pytest

from esmeray.model.parameter_groups import RATE_SHARE, parameter_groups
from tests.model.support import build_model, tiny_section


@pytest.mark.parametrize("frozen", [True, False])
def test_each_trainable_parameter_is_in_one_group_of_its_rate_and_decay(frozen):
    model = build_model(tiny_section("autoencoder", frozen=frozen), seed=0)
    slow = model.encoder[0].weight
    groups = parameter_groups(model, 0.1, {slow: 0.25})
    grouped = [parameter for group in groups for parameter in group["params"]]
    assert sorted(map(id, grouped)) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    for group in groups:
        assert group["params"] and all(p.ndim > 1 for p in group["params"]) == (group["weight_decay"] == 0.1)
    assert [group["params"] for group in groups if group[RATE_SHARE] != 1.0] == [[slow]]
