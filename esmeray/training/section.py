"""Settings of optimization, DeepSpeed and checkpoints."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from esmeray.train_config.section import (
    END,
    FIXED,
    UNSEEN,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Precision,
    Section,
    Share,
)


class MuonSection(Section):
    """Muon (Jordan et al. 2024) for the matrices of the backbone's layers, if training.optimizer is muon."""

    learning_rate: PositiveFloat = 0.02
    """Peak learning rate of these matrices. It follows training.schedule; all other parameters use
    training.learning_rate."""


class TrainingSection(Section):
    """Optimization."""

    epochs: Annotated[PositiveInt, END] = 1
    """Passes over the training sequences."""
    max_steps: Annotated[PositiveInt | None, END] = None
    """Optimizer steps after which training stops; overrides epochs. none: epochs decide."""
    optimizer: Annotated[Literal["adamw", "muon"], FIXED] = "adamw"
    """adamw, or muon: Muon for the matrices of the backbone's layers and AdamW for embeddings, norms, biases and heads.
    Muon needs ZeRO-0 to 2 without offloading."""
    muon: MuonSection = MuonSection()
    learning_rate: PositiveFloat = 4e-4
    """Peak learning rate of AdamW."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up. cosine, linear: decay until the end. wsd: stable, then a linear decay; if the
    run is given more steps later, it continues from before the decay. constant: no decay."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the steps, at the end of the run, in which wsd decays."""
    min_learning_rate_share: Share = 0.1
    """Share of the peak learning rate at the end of the decay."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of linear warm-up, fewer than the run has. Default: a tenth of the run's steps. wsd needs a number, which
    stays the same if the run is prolonged."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of AdamW and Muon; not applied to biases and norms."""
    weight_mean: Annotated[float | None, Field(gt=0, lt=1), FIXED] = None
    """Decay rate of an exponential mean of the weights, such as 0.999; at step n the rate is at most (1 + n) / (10 +
    n). The mean is part of each checkpoint, for train export --export.weights mean (ZeRO-1 to 3). none: no mean."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Maximum global gradient norm; larger gradients are scaled down. 0: no clipping."""
    precision: Annotated[Precision, FIXED] = "bf16"
    """Precision of the forward and backward pass; fp16 scales the loss. Optimizer state is always fp32. Default: the
    precision of a resumed run. For a new run bf16 on GPUs, and on CPUs if the processors of all nodes have bf16
    instructions. Otherwise fp32, since bf16 without such instructions is thirty times slower."""
    compile: bool | None = None
    """Compile the encoder layers with torch.compile. This cuts the memory traffic between matrix products to a third
    and takes some seconds at the first step. Default: true on CUDA under ZeRO-0 to 2."""
    fp8: bool = False
    """Compute the matrix products of the layers in FP8, by torchao, on NVIDIA Hopper and later. Useful for models of
    650M parameters and more."""
    evaluate_every_steps: PositiveInt = 200
    """Steps between evaluations on the held-out sequences. Evaluations also run before the first step and after the
    last."""
    evaluation_batches: PositiveInt = 32
    """Packed batches per evaluation, over all workers."""
    on_divergence: Literal["stop", "rewind"] = "stop"
    """Training diverges in five consecutive steps with a NaN or infinite loss or gradient; fewer are skipped and
    counted. stop: end the run. rewind: return to the weights of the newest checkpoint before these steps, and leave out
    the batches since then, at most three times in a run."""
    gpu_log_interval: Annotated[NonNegativeFloat, UNSEEN] = 5.0
    """Seconds between samples of GPUs, host and worker in the run's monitoring folder; 0: no samples."""
    cpu_memory_limit_mib: Annotated[PositiveFloat | None, UNSEEN] = None
    """Memory limit of a worker's process on the CPU, in MiB, in place of a GPU's memory size. A worker beyond it counts
    as out of memory. none: no limit."""
    watchdog_s: Annotated[PositiveFloat | None, UNSEEN] = 600.0
    """Seconds without progress after which a worker on Ray saves the stacks of its threads and ends, to be restarted.
    The first step, a checkpoint and the export may take five times as long. none: no limit."""

    @model_validator(mode="after")
    def _warm_up_of_any_length(self) -> "TrainingSection":
        if self.schedule == "wsd" and self.warmup_steps is None:
            raise ValueError(
                "schedule wsd: set warmup_steps, because the default, a tenth of the steps, would change with max_steps"
            )
        return self


class DeepSpeedSection(Section):
    """DeepSpeed ZeRO."""

    stage: Annotated[Annotated[int, Field(ge=0, le=3)] | None, FIXED] = None
    """ZeRO stage, 0 to 3. none: 2."""
    offload_optimizer: Annotated[bool, FIXED] = False
    """Keep the optimizer state in host memory (ZeRO-1 to 3)."""


class CheckpointSection(Section):
    """Checkpoints to resume a run from."""

    every_steps: PositiveInt = 200
    """Steps between checkpoints; one more is saved at the end."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep, in addition to the one with the best validation loss."""
