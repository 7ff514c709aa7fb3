import math
from pathlib import Path

import numpy as np
import pytest
import torch

from esmeray.common.errors import ConfigError, ResourceError
from esmeray.dataset.batches.loader import ResidueSource
from esmeray.dataset.batches.preparation import PreparationSettings
from esmeray.dataset.batches.steps import TrainingSteps
from esmeray.dataset.store.reader import Store
from esmeray.run_folder.checkpoints import CheckpointFolder, CheckpointStore
from esmeray.tasks.masked_lm.section import MaskedLMSection
from esmeray.training.checkpoints.consolidation import full_precision_state
from esmeray.training.checkpoints.writer import CheckpointWriter
from esmeray.training.engine.deepspeed_settings import zero_stage
from esmeray.training.engine.engine import TrainingEngine
from esmeray.training.section import CheckpointSection, DeepSpeedSection, TrainingSection
from tests.dataset.stores import make_store
from tests.model.support import WAITING, Operators, build_model, residue_batch
from tests.runs import a_manifest, tiny_config

CPU = torch.device("cpu")
SEQUENCES = ["MKTAYIAKQR", "GAVLIPFW", "MSTNQDEHKRC"]


def make_engine(stage: int, precision: str = "fp32", task: str = "masked_lm", **training) -> TrainingEngine:
    config = tiny_config(Path("unused"), model={"task": task}, training={"precision": precision} | training)
    model = build_model(config.model, seed=0)
    return TrainingEngine(model, config.training, DeepSpeedSection(stage=stage), CPU)


def train_step(engine: TrainingEngine, spoil: bool = False):
    batch = residue_batch(SEQUENCES)
    output = engine(batch)
    loss_sum = output.loss_sum * float("nan") if spoil else output.loss_sum
    engine.backward(loss_sum, int(output.num_targets))
    return float(output.loss_sum.detach()), engine.step(learning_rate=1e-2)


@pytest.mark.parametrize(
    ("precision", "optimizer", "task"), [("fp32", "adamw", "autoencoder"), ("bf16", "muon", "masked_lm")]
)
def test_no_operator_of_a_step_waits_for_the_device(process_group, tmp_path, precision, optimizer, task, monkeypatch):
    """Use training's own batches: no operator finds nonzeros, reads a value or copies a value from the host."""
    from deepspeed.accelerator import get_accelerator

    store = make_store(tmp_path, [(f"protein{index}", sequence) for index, sequence in enumerate(SEQUENCES)])
    config = tiny_config(tmp_path)
    engine = make_engine(2 if precision == "bf16" else 0, precision, task, optimizer=optimizer)
    masking = MaskedLMSection() if task == "masked_lm" else None
    settings = PreparationSettings(config.data.max_length, 0, random_crops=True, masking=masking)
    batches = TrainingSteps(ResidueSource(Store(store), settings), np.arange(3), batch=config.batch, seed=0)
    with batches:
        step = next(batches.epoch(0))
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_: pytest.fail("DeepSpeed waits for the device"))
    with Operators() as operators:
        for _ in range(3):  # DeepSpeed's timers start in the third step
            for batch in step:
                engine.backward(engine(batch).loss_sum, 1)
            engine.step(1e-3)
    assert sum(operators.counts.values()) > 50
    assert not WAITING & set(operators.counts)


def save(engine: TrainingEngine, root: Path, step: int = 1) -> CheckpointFolder:
    store = CheckpointStore(root)
    writer = CheckpointWriter(store, 0, [0], CheckpointSection())
    writer.write(engine.copy_shards(), a_manifest(step))
    writer.wait()
    return store.complete()[0]


ENGINES = [(0, "fp32", "adamw"), (0, "bf16", "muon"), (1, "fp32", "muon"), (1, "bf16", "adamw"), (2, "bf16", "adamw")]
ENGINES += [(2, "bf16", "muon"), (3, "fp32", "adamw")]


@pytest.mark.parametrize(("stage", "precision", "optimizer"), ENGINES)
def test_nan_step_changes_no_weight_and_a_checkpoint_restores_all_bits(
    process_group, tmp_path, stage, precision, optimizer
):
    engine = make_engine(stage, precision, optimizer=optimizer)
    train_step(engine)
    before = engine.full_precision_state()
    _, result = train_step(engine, spoil=True)
    assert not result.gradient_norm.isfinite()
    assert all(torch.equal(before[name], weight) for name, weight in engine.full_precision_state().items())
    folder = save(engine, tmp_path)
    state = full_precision_state(folder)
    restored = build_model(tiny_config(tmp_path, model={"task": "masked_lm"}).model, seed=1)
    restored.load_state_dict(state, strict=False)
    own = dict(restored.named_parameters())
    for name, value in engine.full_precision_state().items():
        assert value.dtype == torch.float32
        assert torch.equal(state[name], value), name
        assert name not in own or torch.equal(own[name], value), "also where tied weights have another name"
    expected = [train_step(engine)[0] for _ in range(2)]
    assert math.isfinite(sum(expected))
    resumed = make_engine(stage, precision, optimizer=optimizer)
    resumed.load_shards(folder)
    assert [train_step(resumed)[0] for _ in range(2)] == expected


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_stages_take_the_same_step_and_report_the_norm_before_clipping(process_group, stage):
    reference, engine = make_engine(1), make_engine(stage)
    for _ in range(2):
        expected_norm = float(train_step(reference)[1].gradient_norm)
        assert float(train_step(engine)[1].gradient_norm) == pytest.approx(expected_norm, rel=1e-4)
    assert expected_norm > 1.0
    expected, actual = reference.full_precision_state(), engine.full_precision_state()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-5)  # a thousandth of an update


def test_optimizer_settings_of_the_config_count_after_resuming(process_group, tmp_path):
    folder = save(make_engine(2), tmp_path)
    config = tiny_config(tmp_path, model={"task": "masked_lm"}, training={"betas": [0.5, 0.6], "weight_decay": 0.25})
    model = build_model(config.model, seed=0)
    engine = TrainingEngine(model, config.training, DeepSpeedSection(stage=2), CPU)
    engine.load_shards(folder)
    decaying, plain = engine._engine.optimizer.param_groups
    assert (decaying["weight_decay"], plain["weight_decay"]) == (0.25, 0.0)
    assert decaying["betas"] == (0.5, 0.6)


def test_bf16_keeps_buffers_in_fp32(process_group):
    engine = make_engine(2, "bf16", task="autoencoder")
    assert {b.dtype for b in engine.module.buffers() if b.is_floating_point()} == {torch.float32}
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}


def test_engine_compiles_nothing_that_it_does_not_use(process_group):
    make_engine(stage=2)
    from deepspeed.runtime import compiler
    from deepspeed.runtime.zero.muon import original_muon

    assert not hasattr(original_muon.muon_update, "_torchdynamo_orig_callable")
    assert compiler.compile() is torch.compile


def test_fp16_without_gpu_is_refused(process_group):
    with pytest.raises(ResourceError, match="fp16 needs a GPU"):
        make_engine(2, "fp16")


@pytest.mark.parametrize(
    ("optimizer", "section", "message"),
    [
        ("adamw", {"stage": 0, "offload_optimizer": True}, "needs ZeRO"),
        ("muon", {"stage": 3}, "set deepspeed.stage to 2"),
        ("muon", {"offload_optimizer": True}, "where their"),
    ],
)
def test_settings_that_can_not_be_combined_are_refused(optimizer, section, message):
    with pytest.raises(ConfigError, match=message):
        zero_stage(TrainingSection(optimizer=optimizer), DeepSpeedSection(**section))
