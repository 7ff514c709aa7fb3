from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from esmeray.common.errors import CheckpointError, ConfigError
from esmeray.run_folder.checkpoints import CheckpointStore
from esmeray.tools.train.export import main as export
from esmeray.training.checkpoints.consolidation import full_precision_state
from esmeray.training.engine.deepspeed_settings import deepspeed_settings
from esmeray.training.engine.zero import WEIGHT_MEAN
from esmeray.training.section import DeepSpeedSection, TrainingSection
from tests.runs import exported_weights, run_folder, tiny_config
from tests.training.runs import finish


def test_exported_mean_is_that_of_the_weights_of_all_steps(process_group, tmp_path: Path):
    training = {"max_steps": 6, "evaluate_every_steps": 100, "optimizer": "muon", "weight_mean": 0.3}
    checkpoint = {"every_steps": 1, "keep_last": 6}
    config = tiny_config(tmp_path, training=training, checkpoint=checkpoint, model={"task": "masked_lm"})
    run = run_folder(config)
    finish(config)
    last, *earlier = CheckpointStore(run.checkpoints).complete()
    first, *later = [full_precision_state(folder) for folder in reversed([last, *earlier])]
    mean = first
    for step, weights in enumerate(later, start=2):
        decay = min(0.3, (1 + step) / (10 + step))
        mean = {name: decay * mean[name] + (1 - decay) * weight for name, weight in weights.items()}
    for name, weight in full_precision_state(last, WEIGHT_MEAN).items():
        torch.testing.assert_close(weight, mean[name], rtol=1e-5, atol=1e-6)
    export([str(run.path), "--export.weights", "mean", "--export.output", str(tmp_path / "mean")])
    exported = load_file(tmp_path / "mean" / "model.safetensors")
    weight = "esm.encoder.layer.0.attention.self.query.weight"
    assert torch.equal(exported[weight], full_precision_state(last, WEIGHT_MEAN)[f"backbone.model.{weight[4:]}"])
    assert not torch.equal(exported[weight], exported_weights(config)[f"model.safetensors/{weight}"])


def test_checkpoint_without_a_mean_and_a_run_without_zero_are_refused(undisturbed):
    folder = CheckpointStore(run_folder(undisturbed).checkpoints).complete()[0]
    with pytest.raises(CheckpointError, match=r"training\.weight_mean was not set"):
        full_precision_state(folder, WEIGHT_MEAN)
    with pytest.raises(ConfigError, match=r"deepspeed\.stage to 1 or 2"):
        deepspeed_settings(TrainingSection(weight_mean=0.9), DeepSpeedSection(stage=0))
