"""Batches of one shape: fillers change nothing, and one compiled graph takes every batch and every layer."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from dataset.packed_batch import BatchShape, PackedBatch
from model.tasks.base import TaskModel
from tests.model.support import assert_near, build_model, masked_batch, random_sequences, residue_batch, tiny_section
from tests.model.tasks.test_classifier import KINDS, POOLINGS, build, labelled

LENGTHS = [12, 1, 40, 3, 7]
SHAPES = [BatchShape(80, 8, 42), BatchShape(300, 32, 42)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads share out the tokens of a sum: with more tokens it is added up in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gradients(model: TaskModel, batch: PackedBatch) -> tuple[dict, dict]:
    model.zero_grad()
    output = model(batch)
    output.loss_sum.backward()
    return output.metrics, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(model: TaskModel, batch: PackedBatch, shape: BatchShape) -> None:
    """The same metrics and gradients, to the bit."""
    for alone, filled in zip(gradients(model, batch), gradients(model, batch.filled(shape)), strict=True):
        assert alone.keys() == filled.keys()
        for name, value in alone.items():
            assert torch.equal(value, filled[name]), name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("task", ["masked_lm", "autoencoder"])
def test_fillers_change_no_metric_and_no_gradient(task, shape):
    sequences = random_sequences(LENGTHS)
    batch = masked_batch(sequences, [0.3] * len(sequences)) if task == "masked_lm" else residue_batch(sequences)
    assert_equal(build_model(tiny_section(task), seed=0), batch, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kind", "pooling"), [*((kind, "mean") for kind in KINDS), *(("multiclass", pooling) for pooling in POOLINGS[1:])]
)
def test_fillers_change_no_metric_and_no_gradient_of_a_classifier(kind, pooling, shape):
    assert_equal(build(kind, pooling=pooling), labelled(kind, LENGTHS), shape)


@pytest.fixture
def graphs() -> Iterator[dict[str, Counter]]:
    """What torch's compiler counts, from nothing."""
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


def batches_of(task: str) -> list[PackedBatch]:
    """Three of different sequences, in one shape."""
    many = [random_sequences(lengths) for lengths in ([12, 1, 40], [40, 38, 3, 9], [5])]
    made = [residue_batch(some) if task == "autoencoder" else masked_batch(some, [0.3] * len(some)) for some in many]
    return [batch.filled(BatchShape(160, 16, 42)) for batch in made]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("task", ["masked_lm", "autoencoder"])
def test_one_graph_without_a_break_serves_every_layer_and_batch(task, checkpointing, graphs):
    model = build_model(tiny_section(task, checkpointing=checkpointing), seed=0)
    model.backbone.compile_layers(backend="eager")
    for batch in batches_of(task):
        gradients(model, batch)
    assert graphs["stats"]["unique_graphs"] == 1
    assert not graphs["graph_break"]


@pytest.mark.slow
def test_compiled_layers_compute_what_eager_ones_do(graphs):
    model, eager = (build_model(tiny_section("masked_lm"), seed=0) for _ in range(2))
    model.backbone.compile_layers()
    for batch in batches_of("masked_lm"):
        (metrics, compiled), (expected, reference) = gradients(model, batch), gradients(eager, batch)
        assert_near(list(metrics.values()), list(expected.values()))
        assert_near(list(compiled.values()), list(reference.values()))
