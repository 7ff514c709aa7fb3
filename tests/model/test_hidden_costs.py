"""What a batch costs in calls does not grow with its sequences, and no step waits for the device unseen."""

from dataclasses import replace

import pytest
import torch

from esmeray.dataset.packed_batch import WEIGHTS, PackedBatch
from esmeray.model.task_model import TaskModel
from tests.model.support import (
    Operators,
    build_model,
    masked_batch,
    no_waiting,
    random_sequences,
    tiny_section,
)
from tests.tasks.test_classifier_model import KINDS, POOLINGS, build, labelled

TASKS = ["masked_lm", "autoencoder"]


def model_of(name: str) -> TaskModel:
    """A task on residues, a classifier of this kind, or one with this pooling."""
    if name in TASKS:
        return build_model(tiny_section(name), seed=0)
    return build(pooling=name) if name in POOLINGS else build(name)


def batch_of(name: str, lengths: list[int]) -> PackedBatch:
    if name not in TASKS:
        return labelled(name if name in KINDS else "multiclass", lengths)
    batch = masked_batch(random_sequences(lengths), [0.2] * len(lengths))
    return replace(batch, target_positions=batch.find_targets())


@pytest.mark.parametrize("name", ["masked_lm", *POOLINGS])
def test_a_step_over_many_sequences_runs_as_many_operators_as_over_few(name):
    model, counts = model_of(name), []
    for sequences in (2, 3, 40):  # gradients are there from the second step on
        with Operators() as operators:
            model(batch_of(name, [10] * sequences)).loss_sum.backward()
        counts.append(operators.counts)
    assert counts[1] == counts[2] and sum(counts[1].values()) > 50


def test_compiled_layers_are_traced_for_no_further_shape():
    model = model_of("masked_lm")
    counters = torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    counters.clear()
    model.backbone.compile_layers(backend="eager")  # tracing is what would go on without end
    graphs = []
    for sequences in (2, 3, 10):
        model(batch_of("masked_lm", [600 // sequences] * sequences)).loss_sum.backward()
        graphs.append(counters["unique_graphs"])
    torch._dynamo.reset()
    assert graphs[-1] == graphs[1] > 0


@pytest.mark.cuda
@pytest.mark.parametrize("name", [*TASKS, *KINDS, "light_attention"])
def test_a_step_never_waits_for_the_device(name):
    model, batch = model_of(name).cuda().bfloat16(), batch_of(name, [40, 7, 90])
    if name not in TASKS:
        batch = batch.adding(by_sequence={WEIGHTS: torch.ones(3)})
    batch = batch.to("cuda")
    model(batch).loss_sum.backward()  # what is set up once
    with no_waiting():
        model(batch).loss_sum.backward()
