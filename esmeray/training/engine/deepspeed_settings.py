"""The DeepSpeed settings of a run: the settings file, completed from the experiment's config.

Imports neither DeepSpeed nor torch, so that plans and error messages appear at once.
"""

from pathlib import Path
from typing import Any

import yaml

from esmeray.common.errors import ConfigError, ResourceError
from esmeray.common.text import first_line
from esmeray.train_config.bounded_yaml import BoundedLoader
from esmeray.train_config.natures import SHIPPED_PATH, absolute_path
from esmeray.training.section import DeepSpeedSection, TrainingSection

OWNED_KEYS = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "managed_gradient_accumulation",
        "gradient_clipping",
        "optimizer",
        "scheduler",
        "bf16",
        "fp16",
        "amp",
        "torch_autocast",
    }
)
"""Keys of DeepSpeed's settings that the experiment's config decides."""

LOWEST_LOSS_SCALE = 1.0


def check_precision(training: TrainingSection, device_type: str) -> None:
    """Raise ResourceError for fp16 on the CPU, for which DeepSpeed has no kernels."""
    if training.precision == "fp16" and device_type == "cpu":
        raise ResourceError("training.precision fp16 needs a GPU: use bf16 or fp32 on the CPU")


def deepspeed_settings(training: TrainingSection, section: DeepSpeedSection) -> dict[str, Any]:
    """Return the settings. Raises ConfigError if the file is missing, is no mapping, or has a key of
    :data:`OWNED_KEYS`."""
    settings = _read_settings(Path(absolute_path(section.config, SHIPPED_PATH)))
    zero = settings.setdefault("zero_optimization", {})
    if section.stage is not None:
        zero["stage"] = section.stage
    stage = zero.setdefault("stage", 2)
    for refusal, is_so in _refusals(stage, training, section).items():
        if is_so:
            raise ConfigError(refusal)
    if section.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if stage < 2:  # DeepSpeed 0.19.8 refuses it when the caller ends the accumulation
        zero["overlap_comm"] = False
    if stage == 0 or training.precision == "fp32":  # in stage 0 gradients always have the model's dtype
        settings.pop("data_types", None)
    settings.setdefault("timers", {"throughput": {"enabled": False}})  # it synchronizes twice a batch
    return settings | {
        # The training loop forms batches and scales their sum: DeepSpeed must divide by the number of workers only.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # False: step() ends the accumulation, so that a step may have any number of batches. With False, overlap_comm
        # works in stage 2 alone.
        "managed_gradient_accumulation": False,
        "gradient_clipping": training.gradient_clipping,
        "zero_allow_untested_optimizer": True,  # our optimizers are subclasses, which are not on DeepSpeed's list
        "zero_force_ds_cpu_optimizer": False,  # otherwise offloading accepts DeepSpeed's own optimizer only
        "bf16": {"enabled": training.precision == "bf16"},
        "fp16": {
            "enabled": training.precision == "fp16",
            "initial_scale_power": 16,
            "min_loss_scale": LOWEST_LOSS_SCALE,
        },
        "steps_per_print": None,
    }


def _refusals(stage: int, training: TrainingSection, section: DeepSpeedSection) -> dict[str, bool]:
    """Error messages of settings that can't be combined, each with whether it applies to this run."""
    is_muon = training.optimizer == "muon"
    return {
        "deepspeed.offload_optimizer needs ZeRO: set deepspeed.stage to 1, 2 or 3": (
            section.offload_optimizer and stage == 0
        ),
        "deepspeed.offload_optimizer: Muon would multiply matrices on the CPU, where their momentum is: set it "
        "to false, or training.optimizer to adamw": section.offload_optimizer and is_muon,
        "training.optimizer muon: under ZeRO-3 no worker has a complete matrix: set deepspeed.stage to 2, or "
        "training.optimizer to adamw": stage == 3 and is_muon,
        "training.weight_mean: needs ZeRO, because checkpoints without ZeRO do not map optimizer states to "
        "parameters: set it to none, or deepspeed.stage to 1 or 2": stage == 0 and training.weight_mean is not None,
    }


def zero_stage(training: TrainingSection, section: DeepSpeedSection) -> int:
    """Return the ZeRO stage of a run. Raises ConfigError like :func:`deepspeed_settings`."""
    return int(deepspeed_settings(training, section)["zero_optimization"]["stage"])


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.load(path.read_text(), Loader=BoundedLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"deepspeed.config: {path} can't be read ({first_line(error)})") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"deepspeed.config: {path} must contain a mapping of DeepSpeed settings")
    if owned := sorted(OWNED_KEYS & set(settings)):
        raise ConfigError(
            f"deepspeed.config: {path} sets {', '.join(owned)}, which Esmeray sets from its own config: remove "
            "it from the file"
        )
    zero = settings.get("zero_optimization") or {}
    # DeepSpeed 0.19.8 maps parameters to the wrong fp32 values with round_robin_gradients, so exported weights would be
    # garbage. Its elastic_checkpoint changes the layout of the shards, and still requires the same number of workers.
    if unusable := [name for name in ("round_robin_gradients", "elastic_checkpoint") if zero.get(name)]:
        raise ConfigError(
            f"deepspeed.config: {path} sets {unusable[0]}, which is not supported: remove it from the file"
        )
    return settings
