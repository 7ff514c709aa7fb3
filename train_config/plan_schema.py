"""Settings of a run on paper: a cluster that is not at hand, and what is assumed of it."""

from typing import Annotated, Literal

from pydantic import Field

from esmeray.train_config.section import NonNegativeFloat, PositiveFloat, PositiveInt, Precision, Section, Share, Tokens


class PlanAssumptions(Section):
    """What is assumed of cluster and GPUs; set what you have measured."""

    mfu: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the peak that forward and backward pass reach (perf/mfu of a run). Default: products at 80 % of the
    peak, attention at 35 %, everything else at 83 % of the memory's speed."""
    network: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the links' speed in collectives of many megabytes."""
    overlap: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Share of the backward pass (ZeRO-3: of both passes) beside which ZeRO-2 and 3 communicate."""
    jitter: NonNegativeFloat = 0.01
    """Standard deviation of a worker's time in a step, as a share of it: all wait for the slowest."""
    memory_reserve: Share = 0.1
    """Share of a GPU's memory left to the allocator, kernels and NCCL."""
    mtbf_gpu_hours: PositiveFloat = 49_000.0
    """GPU-hours between two faults, each of which ends all workers."""
    restart_s: NonNegativeFloat = 180.0
    """Seconds from a fault to the next step, without reading the checkpoint."""
    storage_gb_per_s: PositiveFloat = 5.0
    """Speed of the storage of checkpoints, for all workers together, GB/s."""
    host_gb_per_s: PositiveFloat = 6.0
    """Speed of a GPU's copies to host memory, for which steps wait at a checkpoint, GB/s."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of a GPU in the precision. This and the next three have defaults for known GPUs."""
    memory_gb: PositiveFloat | None = None
    """Memory of a GPU, GB."""
    memory_gb_per_s: PositiveFloat | None = None
    """Speed of a GPU's memory, GB/s."""
    link_gb_per_s: PositiveFloat | None = None
    """Speed of the link between GPUs of a node, in one direction, GB/s."""


class PlanSection(Section):
    """Model, cluster and steps. Settings that an experiment has too mean the same."""

    model: str = "esm2_t33_650M"
    """Model to train as masked_lm, named as model.backbone.source is; of a hub name only config.json is fetched."""
    gpus: PositiveInt = 8
    """Number of GPUs, with one worker each."""
    gpu: str = "H100"
    """B200, H200, H100, GH200, A100, A100-40GB, L40S, V100-SXM2-32GB or another name that nvidia-smi shows."""
    gpus_per_node: PositiveInt = 8
    """GPUs of a node, linked by NVLink where they have it."""
    interconnect: Literal["ib100", "ib200", "ib400", "ib800"] | PositiveFloat = "ib400"
    """InfiniBand or RoCE between nodes by its Gbit/s for each GPU, or these Gbit/s."""
    stage: Annotated[int, Field(ge=0, le=3)] = 2
    """ZeRO stage 0 to 3, as deepspeed.stage."""
    precision: Precision = "bf16"
    """Precision of the computation, as training.precision; fp32 is computed in TF32 where the GPU has it."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer, as training.optimizer names it."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass, as model.backbone.gradient_checkpointing."""
    compile: bool | None = None
    """Compile the model's layers, as training.compile."""
    tokens: Tokens | None = None
    """Token budget of a micro-batch, as batch.tokens. Default: the largest that fits and divides the step."""
    global_tokens: PositiveInt = 2**21
    """Tokens of a step, as batch.global_tokens; rounded up to whole micro-batches on every GPU."""
    context: PositiveInt = 430
    """Tokens that a token attends to: the mean over tokens of the length of their sequence."""
    total_tokens: PositiveFloat = 1e12
    """Tokens to train on in all."""
    json_output: str | None = None
    """Also write the plan to this file, as JSON."""
    assume: PlanAssumptions = PlanAssumptions()
