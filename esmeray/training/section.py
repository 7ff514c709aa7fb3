"""Settings of the optimisation, of DeepSpeed and of checkpoints."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from esmeray.train_config.natures import END, FIXED, SHIPPED_PATH, UNSEEN
from esmeray.train_config.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Precision,
    Section,
    Share,
)


class MemoryGuardSection(Section):
    """Handling of out of memory while training."""

    enabled: bool = True
    """Repeat a step that was out of memory with its batches in halves, and keep the halves: the optimizer's step and
    its result stay the same. Where workers already wait for each other, resume from the last checkpoint."""
    max_halvings: NonNegativeInt = 3
    """Times that batches may be halved in a run."""


class MuonSection(Section):
    """Muon (Jordan et al. 2024), of the matrices of the backbone's layers where training.optimizer is muon."""

    learning_rate: PositiveFloat = 0.02
    """Peak learning rate of these matrices, which follows training.schedule; training.learning_rate is that of the
    rest."""
    momentum: Share = 0.95
    """Decay rate of Muon's momentum."""
    warmup_momentum: Share = 0.85
    """Decay rate of Muon's momentum at the first step, from where it rises linearly to momentum."""
    momentum_warmup_steps: NonNegativeInt = 300
    """Steps in which warmup_momentum rises to momentum."""


class TrainingSection(Section):
    """The optimisation."""

    epochs: Annotated[PositiveInt, END] = 1
    """Passes over the training sequences."""
    max_steps: Annotated[PositiveInt | None, END] = None
    """Optimizer steps after which to stop, in place of epochs."""
    optimizer: Annotated[Literal["adamw", "muon"], FIXED] = "adamw"
    """adamw; muon: Muon for the matrices of the backbone's layers, AdamW for embeddings, norms, biases and heads, under
    ZeRO-0 to 2 without offloading."""
    muon: MuonSection = MuonSection()
    learning_rate: PositiveFloat = 4e-4
    """Peak learning rate of AdamW."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up. cosine, linear: decay until the end; wsd: stable, then a linear decay, which a
    run that is given more steps later takes back; constant: no decay."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the steps, at the end, in which wsd decays."""
    min_learning_rate_share: Share = 0.1
    """Share of the peak that the rate decays to."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of linear warm-up, fewer than those of the run. Default: a tenth of these; wsd has to be given a number,
    the same however long the run becomes."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Epsilon of AdamW, which keeps a step finite where a gradient is 0."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of AdamW and Muon; biases and norms are left out."""
    weight_mean: Annotated[float | None, Field(gt=0, lt=1), FIXED] = None
    """Decay rate of an exponential mean of the weights, such as 0.999, at most (1 + step) / (10 + step): a part of each
    checkpoint, for train export --export.weights mean (ZeRO-1 to 3). none: no mean."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 leaves gradients as they are."""
    precision: Annotated[Precision, FIXED] = "bf16"
    """Precision of the forward and backward pass; fp16 scales the loss. Optimizer state is fp32 in each. Default: the
    precision of a run that is resumed; else bf16 on GPUs and if the processors of all nodes have instructions for it;
    else fp32, since bf16 without instructions for it is thirty times slower."""
    tf32: bool = True
    """Use TF32 for what remains fp32 on CUDA."""
    cudnn_benchmark: bool = False
    """Let cuDNN time its kernels on each new shape and keep the fastest. For convolutions whose shapes repeat; packed
    batches rarely have the same twice."""
    compile: bool | None = None
    """Compile the encoder layers with torch.compile: a third of the memory traffic between matrix products, for some
    seconds at the first step. Default: on CUDA, under ZeRO-0 to 2."""
    fp8: bool = False
    """Matrix products of the layers in FP8, by torchao, on NVIDIA Hopper and later: for models of 650M and more."""
    deterministic: bool = False
    """Refuse CUDA kernels whose result depends on timing."""
    evaluate_every_steps: PositiveInt = 200
    """Steps between evaluations on the held-out sequences; more come before the first and after last."""
    evaluation_batches: PositiveInt = 32
    """Packed batches, over all workers, that an evaluation looks at."""
    max_nonfinite_steps: PositiveInt = 5
    """Steps in a row with a NaN or infinite loss or gradient after which training diverged; fewer are skipped and
    counted."""
    on_divergence: Literal["stop", "rewind"] = "stop"
    """stop: end the run; rewind: return to the weights of the newest checkpoint before the steps that were not finite,
    and leave out the batches since then."""
    max_rewinds: PositiveInt = 3
    """Times that a run is rewound; then it ends."""
    checksum_every_steps: Annotated[PositiveInt | None, UNSEEN] = None
    """Steps between comparisons of the weights over the workers (ZeRO-0 to 2), beside one before each checkpoint; where
    they differ, training starts again from the newest checkpoint. none: never."""
    log_every_steps: Annotated[PositiveInt, UNSEEN] = 1
    """Steps between lines of metrics.jsonl."""
    gpu_log_interval: Annotated[NonNegativeFloat, UNSEEN] = 5.0
    """Seconds between samples of GPUs, host and worker, in the run's monitoring folder; 0 for none."""
    cpu_memory_limit_mib: Annotated[PositiveFloat | None, UNSEEN] = None
    """Memory that a worker's process may take on the CPU, MiB, where it stands in for a GPU's: beyond it the
    worker counts as out of memory."""
    memory_guard: Annotated[MemoryGuardSection, UNSEEN] = MemoryGuardSection()
    watchdog_s: Annotated[PositiveFloat | None, UNSEEN] = 600.0
    """Seconds without progress after which a worker on Ray saves its threads' stacks and ends, to be started again; the
    first step, a checkpoint and the export may take five times as long. none: wait for ever."""

    @model_validator(mode="after")
    def _warm_up_of_any_length(self) -> "TrainingSection":
        if self.schedule == "wsd" and self.warmup_steps is None:
            raise ValueError("schedule wsd: set warmup_steps, as a tenth of the steps would change with their number")
        return self

    @model_validator(mode="after")
    def _repeatable_kernels(self) -> "TrainingSection":
        if self.deterministic and self.cudnn_benchmark:
            raise ValueError(
                "cudnn_benchmark chooses kernels by timing them, which deterministic forbids: set one of them to false"
            )
        return self


class DeepSpeedSection(Section):
    """DeepSpeed ZeRO."""

    config: Annotated[str, UNSEEN, SHIPPED_PATH] = "train_config/zero2.yaml"
    """DeepSpeed's own settings as YAML. It may not have what Esmeray sets (batch sizes, precision, optimizer,
    clipping)."""
    stage: Annotated[Annotated[int, Field(ge=0, le=3)] | None, FIXED] = None
    """ZeRO stage 0 to 3, in place of the file's."""
    offload_optimizer: Annotated[bool, FIXED] = False
    """Keep the optimizer state in host memory (stages 1 to 3)."""


class CheckpointSection(Section):
    """Checkpoints to resume a run from."""

    every_steps: PositiveInt = 200
    """Steps between checkpoints; one more comes at the end."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep."""
    keep_best: NonNegativeInt = 1
    """Checkpoints with the best validation loss to keep as well."""
    asynchronous: bool = True
    """Write and hash checkpoints in the background while training continues."""
    memory_every_steps: PositiveInt | None = None
    """Steps between copies of the state in the host's /dev/shm, from which training resumes when a worker is lost and
    its machine is not; the newest two are kept until the run ends. none: on the disk alone."""
    memory_limit_gib: PositiveFloat | None = None
    """The most that these copies may take on a machine, GiB. Default: what /dev/shm has free at the start."""
