"""What a batch costs in calls does not grow with its sequences, and no step waits for the device unseen."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from esmeray.dataset.packed_batch import PackedBatch
from tests.model.support import (
    WAITING,
    Operators,
    build_model,
    masked_batch,
    no_waiting,
    random_sequences,
    tiny_section,
)


@pytest.fixture
def masked_lm():
    return build_model(tiny_section("masked_lm"), seed=0)


def batch_of(sequences: int) -> PackedBatch:
    """600 residues in so many sequences."""
    return masked_batch(random_sequences([600 // sequences] * sequences), [0.2] * sequences)


def step(model, sequences: int) -> Counter[str]:
    with Operators() as operators:
        model(batch_of(sequences)).loss_sum.backward()
    return operators.counts


def test_a_step_over_many_sequences_runs_as_many_operators_as_over_few(masked_lm):
    step(masked_lm, 2)  # gradients are there from now on
    few, many = step(masked_lm, 3), step(masked_lm, 100)
    assert few == many and sum(few.values()) > 50


def test_compiled_layers_are_traced_for_no_further_shape(masked_lm):
    counters = torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    counters.clear()
    masked_lm.backbone.compile_layers(backend="eager")  # tracing is what would go on without end
    graphs = []
    try:
        for sequences in (2, 3, 4, 10):
            masked_lm(batch_of(sequences)).loss_sum.backward()
            graphs.append(counters["unique_graphs"])
    finally:
        torch._dynamo.reset()
    assert graphs[-1] == graphs[1] > 0


@pytest.mark.parametrize("task", ["masked_lm", "autoencoder"])
def test_no_operator_of_a_step_waits_for_the_device(task):
    host = masked_batch(random_sequences([40, 7, 90]), [0.2] * 3)
    batch = replace(host, target_positions=host.places_of_targets())
    model = build_model(tiny_section(task), seed=0)
    with Operators() as operators:
        model(batch).loss_sum.backward()
    assert not WAITING & set(operators.counts)


@pytest.mark.cuda
@pytest.mark.parametrize("task", ["masked_lm", "autoencoder"])
def test_a_step_never_waits_for_the_device(task):
    model = build_model(tiny_section(task), seed=0).cuda().bfloat16()
    host = masked_batch(random_sequences([40, 7, 90]), [0.2] * 3)
    batch = replace(host, target_positions=host.places_of_targets()).to("cuda")
    model(batch).loss_sum.backward()  # what is set up once
    with no_waiting():
        model(batch).loss_sum.backward()
