"""DeepSpeed around a task model: precision, ZeRO, clipping, skipped updates and checkpoint shards; torch's switches.

The engine runs with ``managed_gradient_accumulation: false``: :meth:`TrainingEngine.backward` accumulates and
:meth:`TrainingEngine.step` is the boundary, so a step may have any number of batches. Losses are scaled here to means
over the global batch; DeepSpeed then averages gradients over the workers.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esmeray.common.errors import CheckpointError, ConfigError, ResourceError
from esmeray.common.own_folders import cache_folder
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.optimization import use_fp8
from esmeray.model.parameter_groups import MATRICES, RATE_SHARE, layer_matrices, parameter_groups
from esmeray.model.task_model import TaskModel
from esmeray.run_folder.checkpoints import CheckpointFolder
from esmeray.training.engine.deepspeed_settings import LOWEST_LOSS_SCALE, check_precision, deepspeed_settings
from esmeray.training.engine.deepspeed_setup import prepare_deepspeed
from esmeray.training.engine.muon import MOMENTUM, PEAK_MOMENTUM, ClippingMuon
from esmeray.training.engine.step_clock import StepClock, time_collectives
from esmeray.training.engine.zero import ClippingAdamW, add_up_in_place, clear_partitioned_gradients, clip_on_device
from esmeray.training.section import DeepSpeedSection, TrainingSection

SHARDS_FOLDER = "deepspeed"
OPTIMIZER_SETTINGS = ("betas", "eps", "weight_decay", RATE_SHARE)


def apply_device_settings() -> None:
    """Allow TF32 in this process, for the products that remain in fp32."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def prepare_layers(
    backbone: PackedBackbone | None, training: TrainingSection, device: torch.device, stage: int = 0
) -> None:
    """Enable FP8 products and compile the layers if set. By default, layers are compiled on CUDA under ZeRO-0 to 2.

    Compiled code is cached in the user's cache folder. Raises ResourceError if the device has no FP8, and ConfigError
    if torchao is not installed or settings can't be combined.
    """
    if backbone is None:
        return  # a model on vectors has no layers
    if training.compile and stage == 3:
        raise ConfigError(
            "training.compile: torch can't compile the hooks in which ZeRO-3 gathers weights; set it to false"
        )
    if training.fp8:
        if training.precision != "bf16":
            raise ConfigError("training.fp8 needs training.precision bf16")
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
            raise ResourceError("training.fp8 needs an NVIDIA GPU with FP8 (Hopper or later): set it to false")
        use_fp8(backbone)
    if training.compile or (training.compile is None and device.type == "cuda" and stage < 3):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("inductor")))
        backbone.compile_layers()


class StepResult(NamedTuple):
    """Global gradient norm before clipping, () fp32. It is not finite if the update was skipped.

    The device may still be computing it. ``lowest_scale``: the loss scale was already the lowest, so that lowering it
    can't help.
    """

    gradient_norm: Tensor
    lowest_scale: bool


def make_optimizer(
    model: TaskModel, training: TrainingSection, rate_shares: Mapping[nn.Parameter, float]
) -> ClippingAdamW:
    """Create the optimizer of a model's trainable parameters. Muon updates the matrices of the backbone's layers."""
    settings: dict[str, Any] = {
        "lr": training.learning_rate,
        "betas": training.betas,
        "eps": 1e-8,  # keeps a step finite if a gradient is 0
        "fused": True,  # the kernel clips and skips updates on the device
    }
    if training.optimizer == "adamw":
        return ClippingAdamW(parameter_groups(model, training.weight_decay, rate_shares), **settings)
    matrices = layer_matrices(model.layers)
    # The loop sets one rate, and each group uses a multiple of it. Muon's own rate becomes such a multiple.
    ratio = training.muon.learning_rate / training.learning_rate
    shares = dict(rate_shares) | {matrix: ratio * rate_shares.get(matrix, 1.0) for matrix in matrices}
    groups = parameter_groups(model, training.weight_decay, shares, matrices)
    for group in groups:
        if MATRICES in group:
            group[MOMENTUM] = PEAK_MOMENTUM
    return ClippingMuon(groups, torch.float32 if training.precision == "fp32" else torch.bfloat16, **settings)


class TrainingEngine:
    """A task model in fp32, moved to ``device``, with an optimizer of its trainable parameters and DeepSpeed.

    Its layers are prepared by :func:`prepare_layers`.

    ``rate_shares``: see :func:`~esmeray.model.parameter_groups.parameter_groups`. Raises ConfigError if DeepSpeed's
    settings can't be used, and ResourceError for fp16 on a device without fp16 kernels.
    """

    def __init__(
        self,
        model: TaskModel,
        training: TrainingSection,
        deepspeed_section: DeepSpeedSection,
        device: torch.device,
        rate_shares: Mapping[nn.Parameter, float] | None = None,
    ):
        settings = deepspeed_settings(training, deepspeed_section)
        check_precision(training, device.type)
        if deepspeed_section.offload_optimizer:
            settings["zero_optimization"]["offload_optimizer"]["pin_memory"] = device.type == "cuda"
        prepare_deepspeed(device)
        import deepspeed

        from esmeray.training.checkpoints.writer import ShardFiles

        self.device, self.world_size = device, torch.distributed.get_world_size()
        self.stage: int = settings["zero_optimization"]["stage"]
        if self.stage == 1 and training.precision == "bf16":  # ZeRO-1 checkpoints would have no fp32 weights
            self.stage = settings["zero_optimization"]["stage"] = 2
        # Before the optimizer: it takes the parameters as they are then, and ZeRO-3 partitions them.
        prepare_layers(model.backbone, training, device, self.stage)
        optimizer = make_optimizer(model, training, rate_shares or {})
        optimizer.mean_decay = training.weight_mean
        if self.stage == 0 and training.precision == "fp32":  # otherwise DeepSpeed clips before the norm is computed
            optimizer.max_norm, settings["gradient_clipping"] = training.gradient_clipping, 0.0
        # The optimizer already holds the parameters, which are moved in place.
        model.to(device)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
        zero: Any = self._engine.optimizer
        if isinstance(optimizer, ClippingMuon) and self.stage > 0:
            optimizer.cut_by(zero, torch.distributed.get_rank())
        if self.stage in (1, 2) and training.precision != "fp16" and not deepspeed_section.offload_optimizer:
            clip_on_device(zero, optimizer, training.gradient_clipping)
            if self.world_size == 1:
                add_up_in_place(zero)
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        # The training loop counts such steps and ends the run itself.
        if scaler is not None and hasattr(scaler, "raise_error_at_min_scale"):
            scaler.raise_error_at_min_scale = False
        self._shards = ShardFiles()
        self._engine.checkpoint_engine = self._shards
        # The model file is the same on all workers, and under ZeRO-3 additional workers have none: all read rank 0's
        # (pp rank 0).
        self._engine._get_all_ckpt_names = lambda path, tag: [
            self._engine._get_ckpt_name(path, tag, pp_placeholder="0")
        ]
        # DeepSpeed 0.19.8 would copy a script next to the shards that unpickles them.
        self._engine._copy_recovery_script = lambda save_path: None
        self._end_timing: Callable[[], None] | None = None

    @property
    def module(self) -> nn.Module:
        """The task model, in the precision of training."""
        return self._engine.module

    def __call__(self, batch: PackedBatch) -> Any:
        return self._engine(batch)

    def backward(self, loss_sum: Tensor, global_targets: int) -> None:
        """Accumulate the gradient of ``loss_sum`` / ``global_targets``; ``loss_sum`` is a scalar sum over the batch's
        targets."""
        # DeepSpeed averages over the workers, so multiply by their number. A global batch without targets has no
        # gradient.
        self._engine.backward(loss_sum * (self.world_size / max(1, global_targets)), scale_wrt_gas=False)

    @property
    def can_discard(self) -> bool:
        """True if :meth:`discard_gradients` can be used. Under ZeRO-3 it can't, since the forward pass is collective
        too."""
        return self.stage < 3

    def discard_gradients(self) -> None:
        """Discard all gradients since the last step, including gradients of a failed backward pass.

        For ZeRO-0 to 2. With several workers every worker calls it, and none may have joined a collective of that pass.
        """
        if self.device.type == "cuda":  # kernels of the failed pass may still read the memory that is freed here
            torch.cuda.synchronize(self.device)
        optimizer = self._engine.optimizer
        # The model and the optimizer each clear the gradients that they hold.
        self._engine.zero_grad()
        optimizer.zero_grad(set_to_none=True)
        if hasattr(optimizer, "_backward_active_depth"):  # ZeRO: otherwise the next backward pass counts as nested
            optimizer._backward_active_depth = 0
            optimizer.clear_backward_seen_flag()
        if hasattr(optimizer, "ipg_buckets"):
            clear_partitioned_gradients(optimizer)

    def step(self, learning_rate: float, momentum: float | None = None) -> StepResult:
        """Clip the gradients, update the weights and clear the gradients. If the gradients are not finite, skip the
        update.

        ``momentum``: Muon's momentum, if it differs from the settings. The call waits for the device, as DeepSpeed
        does, with fp16, with fp32 under ZeRO-1 and 2, with offloading, with several workers and under ZeRO-3.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate * group.get(RATE_SHARE, 1.0)
            if MOMENTUM in group and momentum is not None:
                group[MOMENTUM] = momentum
        optimizer = self._engine.optimizer
        # Read the scale before the update, which lowers it if gradients have overflowed. Only fp16 has a loss scale.
        loss_scale = getattr(optimizer, "loss_scale", None)
        is_lowest = not isinstance(loss_scale, int | float) or loss_scale <= LOWEST_LOSS_SCALE
        self._engine.step()
        norm = optimizer.norm if isinstance(optimizer, ClippingAdamW) else self._engine.get_global_grad_norm()
        # When DeepSpeed itself skips a step, it leaves the norm of an earlier step, or none.
        if norm is None or getattr(optimizer, "overflow", False):
            norm = math.nan
        return StepResult(torch.as_tensor(norm), is_lowest)

    def copy_shards(self) -> list[tuple[str, Any]]:
        """Return this rank's part of a checkpoint as ``(file name, state in host memory)``. Every rank calls it."""
        self._engine.save_checkpoint(SHARDS_FOLDER, tag="state", save_latest=False, exclude_frozen_parameters=True)
        collected, self._shards.collected = self._shards.collected, []
        return [(str(path), state) for path, state in collected]

    def load_shards(self, folder: CheckpointFolder) -> None:
        """Load a verified checkpoint of any number of workers. Every rank calls it.

        Raises CheckpointError if a file can't be loaded.
        """
        from esmeray.training.checkpoints.consolidation import Resharding
        from esmeray.training.checkpoints.writer import load_tensors

        self._shards.read = load_tensors
        if self.stage > 0 and folder.manifest().world_size != self.world_size:
            groups, rank = self._engine._get_zero_param_shapes(), torch.distributed.get_rank()
            self._shards.read = Resharding(folder, groups, rank, self.world_size).load
        # Frozen parameters are not in the checkpoint: the model was built with them.
        groups = self._engine.optimizer.param_groups
        settings = [{name: group[name] for name in OPTIMIZER_SETTINGS} for group in groups]
        loaded, _ = self._engine.load_checkpoint(
            str(folder.path / SHARDS_FOLDER), tag="state", load_module_strict=False, load_lr_scheduler_states=False
        )
        if loaded is None:  # DeepSpeed would start from scratch
            raise CheckpointError(f"{folder.path}: DeepSpeed found no training state in it")
        # The checkpoint restores the optimizer settings that it was saved with; the settings of the config override
        # them.
        for group, values in zip(self._engine.optimizer.param_groups, settings, strict=True):
            group.update(values)

    def full_precision_state(self) -> dict[str, Tensor]:
        """Return trainable parameters and persistent buffers in fp32 on the CPU. Every rank calls it and gets the
        same."""
        from deepspeed.utils import safe_get_full_fp32_param

        state = {}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                # A bf16 parameter is rounded: training updates ZeRO's fp32 weights.
                partitioned = hasattr(parameter, "_hp_mapping") or self.stage == 3
                value = safe_get_full_fp32_param(parameter) if partitioned else None
                state[name] = (parameter.detach() if value is None else value).float().cpu().clone()
        # Other buffers, such as tables of positions, are computed again when a model is opened.
        persistent = set(self.module.state_dict())
        for name, buffer in self.module.named_buffers():
            if name in persistent:
                state[name] = buffer.detach().cpu().clone()
        return state

    def time_collectives(self, clock: StepClock, before: Callable[[], None]) -> None:
        self._end_timing = time_collectives(clock, before)

    def close(self) -> None:
        # DeepSpeed's collectives belong to the process: this clock would also time the next engine's collectives.
        if self._end_timing is not None:
            self._end_timing()
        self._engine.destroy()
