"""The DeepSpeed settings of a run, from the experiment's config.

Imports neither DeepSpeed nor torch, so that plans and error messages appear at once.
"""

from typing import Any

from esmeray.common.errors import ConfigError, ResourceError
from esmeray.training.section import DeepSpeedSection, TrainingSection

LOWEST_LOSS_SCALE = 1.0
BUCKET = 50_000_000
"""Elements per bucket of a collective; bounds the communication buffers to 200 MB in fp32."""


def check_precision(training: TrainingSection, device_type: str) -> None:
    """Raise ResourceError for fp16 on the CPU, for which DeepSpeed has no kernels."""
    if training.precision == "fp16" and device_type == "cpu":
        raise ResourceError("training.precision fp16 needs a GPU: use bf16 or fp32 on the CPU")


def zero_stage(training: TrainingSection, section: DeepSpeedSection) -> int:
    """Return the ZeRO stage of a run. Raises ConfigError for settings that can't be combined."""
    stage = 2 if section.stage is None else section.stage
    is_muon = training.optimizer == "muon"
    if section.offload_optimizer and stage == 0:
        raise ConfigError("deepspeed.offload_optimizer needs ZeRO: set deepspeed.stage to 1, 2 or 3")
    if section.offload_optimizer and is_muon:
        raise ConfigError(
            "deepspeed.offload_optimizer: Muon would multiply matrices on the CPU, where their momentum is: set it "
            "to false, or training.optimizer to adamw"
        )
    if stage == 3 and is_muon:
        raise ConfigError(
            "training.optimizer muon: under ZeRO-3 no worker has a complete matrix: set deepspeed.stage to 2, or "
            "training.optimizer to adamw"
        )
    if stage == 0 and training.weight_mean is not None:
        raise ConfigError(
            "training.weight_mean: needs ZeRO, because checkpoints without ZeRO do not map optimizer states to "
            "parameters: set it to none, or deepspeed.stage to 1 or 2"
        )
    return stage


def deepspeed_settings(training: TrainingSection, section: DeepSpeedSection) -> dict[str, Any]:
    """Return the settings. Raises ConfigError like :func:`zero_stage`."""
    stage = zero_stage(training, section)
    # Never round_robin_gradients: DeepSpeed 0.19.8 then maps parameters to the wrong fp32 values, so exported weights
    # would be garbage.
    zero: dict[str, Any] = {
        "stage": stage,
        # Reduce gradients during the backward pass. DeepSpeed 0.19.8 refuses it below stage 2 when the caller ends the
        # accumulation.
        "overlap_comm": stage >= 2,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
    }
    if section.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        "zero_optimization": zero,
        "timers": {"throughput": {"enabled": False}},  # it synchronizes twice a batch
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
    if stage > 0 and training.precision != "fp32":  # in stage 0 gradients always have the model's dtype
        # Sums over many micro-batches per step need more precision than bf16.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
