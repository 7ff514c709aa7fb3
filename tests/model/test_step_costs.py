"""Costs of a step: calls independent of the number of sequences, one graph for all batches and layers, no GPU sync.

Fillers, which give all batches the same shape, change no result.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from esmeray.dataset.batches.loader import ResidueSource
from esmeray.dataset.batches.preparation import PreparationSettings
from esmeray.dataset.batches.steps import TrainingSteps
from esmeray.dataset.packed_batch import WEIGHTS, BatchShape, PackedBatch
from esmeray.dataset.section import BatchSection
from esmeray.dataset.store.reader import Store
from esmeray.model.backbones.base import Checkpointing
from esmeray.model.backbones.lora import adapt
from esmeray.model.section import LoraSection
from esmeray.model.task_model import TaskModel
from esmeray.tasks.masked_lm.section import MaskedLMSection
from esmeray.training.engine.engine import prepare_layers
from esmeray.training.section import TrainingSection
from tests.model.support import (
    TINY_AUTOENCODER,
    Operators,
    assert_near,
    build_model,
    masked_batch,
    no_waiting,
    random_sequences,
    tiny_section,
)
from tests.tasks.test_classifier_model import KINDS, LENGTHS, POOLINGS, build, labelled, with_targets

TASKS = ["masked_lm", "autoencoder"]
RESIDUE_MODELS = [*TASKS, "frozen"]
INTEL = "GenuineIntel" in Path("/proc/cpuinfo").read_text()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: several threads would split a sum over tokens, so its order would depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_of(name: str) -> TaskModel:
    """Build a residue task, a classifier of this kind, or a classifier with this pooling."""
    if name in RESIDUE_MODELS:
        section = tiny_section("masked_lm" if name == "masked_lm" else "autoencoder", frozen=name == "frozen")
        return build_model(section.model_copy(update={"autoencoder": TINY_AUTOENCODER}), seed=0)
    return build(pooling=name) if name in POOLINGS else build(name)


def batch_of(name: str, lengths: list[int]) -> PackedBatch:
    if name not in RESIDUE_MODELS:
        return labelled(name if name in KINDS else "multiclass", lengths)
    batch = masked_batch(random_sequences(lengths), [0.2] * len(lengths))
    return replace(batch, target_positions=batch.find_targets())


def gradients(model: TaskModel, batch: PackedBatch) -> tuple[dict, dict]:
    model.zero_grad()
    output = model(batch)
    output.loss_sum.backward()
    return output.metrics, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [*TASKS, *KINDS, *POOLINGS[1:]])
def test_fillers_change_no_metric_and_no_gradient(name):
    """Metrics and gradients are bitwise equal, except on Intel: its matmuls reorder sums if there are more rows."""
    model, batch = model_of(name), batch_of(name, LENGTHS)
    filled_batch = batch.filled(BatchShape(300, 32, 42))
    for alone, filled in zip(gradients(model, batch), gradients(model, filled_batch), strict=True):
        assert alone.keys() == filled.keys()
        assert_near(list(filled.values()), list(alone.values()), tolerance=1e-6 if INTEL else 0.0)


@pytest.mark.parametrize("name", [*RESIDUE_MODELS, *KINDS, *POOLINGS[1:]])
def test_a_filler_alone_has_no_loss_and_zero_gradients(name):
    model = model_of(name).train()
    output = model(batch_of(name, [9, 5]).without_targets())
    output.loss_sum.backward()
    assert output.loss_sum == 0 and output.num_targets == 0
    assert all(p.grad is not None and p.grad.eq(0).all() for p in model.parameters() if p.requires_grad)
    assert model.metrics(output.metrics) == {}


@pytest.mark.parametrize("name", ["masked_lm", *POOLINGS])
def test_a_step_over_many_sequences_runs_as_many_operators_as_over_few(name):
    model, counts = model_of(name), []
    for sequences in (2, 3, 40):  # from the second step on, gradients are allocated
        with Operators() as operators:
            model(batch_of(name, [10] * sequences)).loss_sum.backward()
        counts.append(operators.counts)
    assert counts[1] == counts[2] and sum(counts[1].values()) > 50


@pytest.fixture
def graphs() -> Iterator[dict[str, Counter]]:
    """Reset and return the counters of torch's compiler."""
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


def epoch(store_path: str, task: str) -> list[PackedBatch]:
    """Batches of an epoch, as in training on CUDA."""
    store = Store(store_path)
    masking = MaskedLMSection() if task == "masked_lm" else None
    source = ResidueSource(store, PreparationSettings(62, 0, random_crops=True, masking=masking))
    section = BatchSection(tokens=512, global_tokens=1024)
    steps = TrainingSteps(source, np.arange(len(store)), batch=section, seed=0, fixed_shapes=True)
    batches = [batch for step in steps.epoch(0) for batch in step]
    return [with_targets(batch, "multiclass") if task == "classifier" else batch for batch in batches]


def a_model(task: str, checkpointing: Checkpointing = False, lora: bool = False) -> TaskModel:
    if task != "classifier":
        return build_model(tiny_section(task, checkpointing=checkpointing), seed=0)
    model = build()
    if lora:
        adapt(model.backbone, LoraSection(rank=2))
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"task": "masked_lm"}, 1),
        ({"task": "masked_lm", "checkpointing": "selective"}, 1),
        ({"task": "classifier", "lora": True}, 2),  # nothing before the first layer needs a gradient
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_one_graph_serves_every_layer_and_batch(settings, expected, store_path, graphs):
    model = a_model(**settings)
    model.backbone.compile_layers(backend="eager")
    for batch in epoch(store_path, settings["task"])[:12]:
        gradients(model, batch)
    assert graphs["stats"]["unique_graphs"] == expected
    assert not graphs["graph_break"]


def test_selective_checkpointing_computes_norms_again_and_no_product(store_path):
    batch = epoch(store_path, "masked_lm")[0]
    counts = {}
    for checkpointing in (False, "selective", True):
        model = a_model("masked_lm", checkpointing)
        with Operators() as operators:
            gradients(model, batch)
        counts[checkpointing] = [operators.counts[f"aten.{name}.default"] for name in ("native_layer_norm", "addmm")]
    (norms, products), selective, whole = counts.values()
    assert selective == [norms + 4, products], "two norms in each of two layers"
    assert whole[1] > products


@pytest.mark.slow
def test_selective_checkpointing_in_a_compiled_layer_changes_no_gradient(store_path):
    plain, selective = (a_model("masked_lm", checkpointing) for checkpointing in (False, "selective"))
    selective.backbone.compile_layers(backend="aot_eager_decomp_partition")
    batch = epoch(store_path, "masked_lm")[0]
    for expected, actual in zip(gradients(plain, batch), gradients(selective, batch), strict=True):
        assert_near(list(actual.values()), list(expected.values()))


@pytest.mark.slow
def test_compiled_layers_equal_eager_layers(store_path, graphs, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    batches = epoch(store_path, "masked_lm")[:3]
    expected = [gradients(a_model("masked_lm"), batch) for batch in batches]
    for _ in range(2):
        torch._dynamo.reset()  # like a new process
        model = a_model("masked_lm")
        prepare_layers(model.backbone, TrainingSection(compile=True), torch.device("cpu"))
        for batch, (metrics, reference) in zip(batches, expected, strict=True):
            measured, compiled = gradients(model, batch)
            assert_near(list(measured.values()), list(metrics.values()))
            assert_near(list(compiled.values()), list(reference.values()))
    assert graphs["aot_autograd"]["autograd_cache_hit"] == 1


@pytest.mark.cuda
@pytest.mark.parametrize("name", [*TASKS, *KINDS, "light_attention"])
def test_a_step_never_waits_for_the_device(name):
    model, batch = model_of(name).cuda().bfloat16(), batch_of(name, [40, 7, 90])
    if name not in TASKS:
        batch = batch.adding(by_sequence={WEIGHTS: torch.ones(3)})
    batch = batch.to("cuda")
    model(batch).loss_sum.backward()  # warm-up
    with no_waiting():
        loss = model(batch).loss_sum
        loss.backward()
    assert loss.isfinite()
