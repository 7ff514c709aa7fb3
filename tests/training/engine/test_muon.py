from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from esmeray.training.engine.muon import ClippingMuon
from tests.model.support import residue_batch
from tests.runs import tiny_config
from tests.training.engine.test_engine import SEQUENCES, make_engine


@pytest.mark.parametrize("shape", [(64, 48), (48, 64)])
def test_updates_of_a_matrix_are_those_of_torch(shape):
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    own, other = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    group = {"params": [own], "matrices": True, "momentum": 0.95, "weight_decay": 0.1}
    optimizers = ClippingMuon([group], torch.bfloat16, lr=0.02), torch.optim.Muon([other], lr=0.02)
    for step in range(5):
        own.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        other.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(own, other, rtol=0, atol=1e-6)
    assert (own - start).abs().max() > 1e-2


def test_matrices_of_the_layers_alone_are_updated_by_it_at_their_rate(process_group):
    engine = make_engine(2, optimizer="muon", muon={"learning_rate": 0.05}, learning_rate=0.01)
    groups = engine._engine.optimizer.param_groups
    assert ["matrices" in group for group in groups] == [False, False, True]
    engine.backward(engine(residue_batch(SEQUENCES)).loss_sum, 1)
    engine.step(0.002, momentum=0.9)
    assert [group["lr"] for group in groups] == pytest.approx([0.002, 0.002, 0.01])
    assert groups[2]["momentum"] == 0.9
    layer = engine.module.backbone.layers[0]
    trained = [parameter for parameter in layer.parameters() if parameter.ndim == 2]
    assert groups[2]["params"][0].numel() == sum(parameter.numel() for parameter in trained)


def test_frozen_backbone_is_refused():
    model = {"backbone": {"frozen": True}}
    with pytest.raises(ValidationError, match=r"model\.backbone\.frozen trains none: set it to adamw"):
        tiny_config(Path("unused"), model=model, training={"optimizer": "muon"})
