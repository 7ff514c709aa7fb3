"""Weight decay reaches matrices alone, and every trainable parameter stands in one group."""

import pytest

from esmeray.model.parameter_groups import RATE_SHARE, parameter_groups
from tests.model.support import build_model, tiny_section


@pytest.mark.parametrize("task", ["autoencoder", "masked_lm"])
@pytest.mark.parametrize("frozen", [True, False])
def test_each_trainable_parameter_stands_in_one_group_and_matrices_alone_decay(task, frozen):
    model = build_model(tiny_section(task, frozen=frozen), seed=0)
    groups = parameter_groups(model, 0.1)
    grouped = [parameter for group in groups for parameter in group["params"]]
    assert sorted(map(id, grouped)) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    for group in groups:
        assert group["params"] and all(p.ndim > 1 for p in group["params"]) == (group["weight_decay"] == 0.1)


def test_parameters_of_another_rate_stand_in_groups_of_their_own():
    model = build_model(tiny_section("masked_lm"), seed=0)
    weight = model.backbone.model.embeddings.word_embeddings.weight
    groups = parameter_groups(model, 0.1, {weight: 0.25})
    assert [group[RATE_SHARE] for group in groups] == [1.0, 1.0, 0.25] and groups[2]["params"] == [weight]
