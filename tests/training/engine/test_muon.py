from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from esmeray.model.cost.memory import count_parameters, estimate_memory
from esmeray.tasks.masked_lm.model import MaskedLM
from esmeray.training.engine.engine import TrainingEngine
from esmeray.training.engine.muon import ClippingMuon, orthogonalized
from tests.model.support import residue_batch
from tests.runs import tiny_config
from tests.training.engine.test_engine import SEQUENCES, make_engine, train_step

STAGES = (0, 1, 2)


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


def test_products_in_fp32_keep_small_what_two_workers_differ_by():
    matrix = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    other = matrix + 1e-5 * torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    exact, rounded = (
        torch.dist(orthogonalized(matrix, dtype), orthogonalized(other, dtype))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert 20 * exact < rounded


def test_matrices_of_the_layers_alone_are_updated_by_it_at_their_rate(process_group):
    engine = make_engine(2, optimizer="muon", muon={"learning_rate": 0.05}, learning_rate=0.01)
    groups = engine._engine.optimizer.param_groups
    assert [group["name"] for group in groups] == ["decay", "no_decay", "matrices_5"]
    engine.backward(engine(residue_batch(SEQUENCES)).loss_sum, 1)
    engine.step(0.002, momentum=0.9)
    assert [group["lr"] for group in groups] == pytest.approx([0.002, 0.002, 0.01])
    assert groups[2]["momentum"] == 0.9
    layer = engine.module.backbone.layers[0]
    trained = [parameter for parameter in layer.parameters() if parameter.ndim == 2]
    assert groups[2]["params"][0].numel() == sum(parameter.numel() for parameter in trained)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_takes_the_bytes_of_the_estimate(process_group, optimizer):
    engine = make_engine(2, "bf16", optimizer=optimizer)
    train_step(engine)
    config = tiny_config(Path("unused"), model={"task": "masked_lm"})
    estimate = estimate_memory(
        count_parameters(MaskedLM.build(config.model, seed=0)),
        stage=2,
        world_size=1,
        precision="bf16",
        optimizer=optimizer,
    )
    states = engine._engine.basic_optimizer.state.items()
    vectors = [t for part, state in states for t in (part, *state.values()) if t.ndim]
    assert sum(t.numel() * t.element_size() for t in vectors) == pytest.approx(estimate.optimizer_bytes, abs=100)


def steps_of(engine: TrainingEngine, rank: int, workers: int) -> dict[str, torch.Tensor]:
    """Weights after three steps on this worker's sequences."""
    targets = sum(map(len, SEQUENCES))
    batch = residue_batch(SEQUENCES[rank::workers])
    for _ in range(3):
        engine.backward(engine(batch).loss_sum, targets)
        engine.step(learning_rate=1e-2)
    return engine.full_precision_state()


def train_rank(rank: int, folder: Path) -> None:
    for stage in STAGES:
        engine = make_engine(stage, optimizer="muon")
        if stage > 0:
            (spans,) = engine._engine.basic_optimizer._spans.values()
            assert any(span.is_cut for span in spans), "both have a part of one"
        torch.save(steps_of(engine, rank, 2), folder / f"{stage}-{rank}.pt")


def test_weights_are_the_same_with_one_and_two_workers_under_each_stage(process_group, worker_group, tmp_path):
    expected = steps_of(make_engine(2, optimizer="muon"), 0, 1)
    worker_group.run(train_rank, tmp_path)
    for stage in STAGES:
        for rank in range(2):
            weights = torch.load(tmp_path / f"{stage}-{rank}.pt")
            for name, weight in expected.items():
                torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-5)


def test_frozen_backbone_is_refused():
    model = {"backbone": {"frozen": True}}
    with pytest.raises(ValidationError, match=r"model\.backbone\.frozen trains none: set it to adamw"):
        tiny_config(Path("unused"), model=model, training={"optimizer": "muon"})
