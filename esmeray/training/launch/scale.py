"""Scaling estimates: memory, step time, checkpoints and faults of a run on a cluster that is not available.

Computes bytes and seconds from the cost of a token, the peaks of a GPU and the settings of a plan. The sources of the
formulas are named. Not modelled: loading, validation, and tensor and pipeline parallelism, which this project does not
have.
"""

import math
from statistics import NormalDist
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from esmeray.model.cost.memory import ParameterCount, activation_bytes_per_token, estimate_memory
from esmeray.train_config.section import PositiveFloat, PositiveInt, Precision, Section
from esmeray.training.engine.deepspeed_settings import BUCKET

LIVE_PARAMETERS = 1_000_000_000
"""Maximum number of parameters that ZeRO-3 of DeepSpeed 0.19.8 gathers."""
PRODUCTS, ATTENTION, MEMORY = 0.8, 0.35, 0.83
"""Shares of a GPU's peaks that large products, FlashAttention and fused kernels reach (docs/gpu.md)."""
NETWORK = 0.8
"""Share of the links' bandwidth that collectives of many megabytes reach."""
GPUS_PER_NODE = 8
"""GPUs per node, linked by NVLink if they have it."""
TOTAL_TOKENS = 1e12
"""Tokens to train on in total."""
PRECISION: Precision = "bf16"
ELEMENT_BYTES = 2
LATENCY_S = 1e-5
"""Seconds per round of a collective between nodes."""
OVERLAP = 0.8
"""Share of the backward pass (ZeRO-3: of both passes) that ZeRO-2 and 3 can overlap with communication."""
JITTER = 0.01
"""Standard deviation of a worker's step time, relative to its mean. All workers wait for the slowest."""
MEMORY_RESERVE = 0.1
"""Share of a GPU's memory reserved for the allocator, kernels and NCCL."""
MTBF_GPU_HOURS = 49_000.0
"""GPU-hours between two faults; each fault ends all workers."""
RESTART_S = 180.0
"""Seconds from a fault to the next step, without reading the checkpoint."""
STORAGE_BYTES_PER_S = 5e9
"""Bandwidth of the checkpoint storage, for all workers together."""
HOST_BYTES_PER_S = 6e9
"""Bandwidth of copies from a GPU to host memory. Steps wait for these copies at a checkpoint."""
FORWARD_VECTORS, BACKWARD_VECTORS = {True: 21.1, False: 66.4}, {True: 35.3, False: 91.4}
"""Vectors of hidden_size channels that a token moves per layer, excluding products and attention; by whether layers are
compiled. Counted in the kernels of ESM-2 650M (docs/gpu.md)."""


class PlanAssumptions(Section):
    """Assumption about the GPUs; replace it with your measurement."""

    mfu: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the peak that forward and backward pass reach (throughput/mfu of a run). Default: products at 80 % of
    the peak, attention at 35 %, everything else at 83 % of the memory bandwidth."""


class PlanSection(Section):
    """Model, cluster and steps. Settings that also exist in an experiment have the same meaning."""

    model: str = "esm2_t33_650M"
    """Model to train as masked_lm, named as in model.backbone.source. For a hub name only config.json is downloaded."""
    gpus: PositiveInt = 8
    """Number of GPUs, with one worker each."""
    gpu: str = "H100"
    """GPU type: B200, H200, H100, GH200, A100, A100-40GB, L40S or another name that nvidia-smi shows."""
    interconnect: Literal["ib100", "ib200", "ib400", "ib800"] | PositiveFloat = "ib400"
    """InfiniBand or RoCE between nodes, named by its Gbit/s per GPU, or a number of Gbit/s per GPU."""
    stage: Annotated[int, Field(ge=0, le=3)] = 2
    """ZeRO stage 0 to 3, as in deepspeed.stage."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer, as in training.optimizer."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass, as in model.backbone.gradient_checkpointing."""
    compile: bool | None = None
    """Compile the model's layers, as in training.compile."""
    global_tokens: PositiveInt = 2**21
    """Tokens per step, as in batch.global_tokens; rounded up to whole micro-batches on every GPU."""
    context: PositiveInt = 430
    """Tokens that a token attends to: the length of its sequence, averaged over tokens."""
    json_output: str | None = None
    """Path of a JSON file to write the plan to in addition. none: no file."""
    assume: PlanAssumptions = PlanAssumptions()


class Work(NamedTuple):
    """Size of a model, and FLOPs of forward and backward pass per token."""

    parameters: ParameterCount
    layers: int
    hidden_size: int
    product_flops: float
    attention_flops: float


class Device(NamedTuple):
    """Peaks of a GPU, and of its link to the other GPUs of the node in one direction."""

    flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float


def memory_parts(work: Work, plan: PlanSection, tokens: int) -> dict[str, float]:
    """Return the bytes on a GPU at a token budget, by part."""
    state = estimate_memory(
        work.parameters, stage=plan.stage, world_size=plan.gpus, precision=PRECISION, optimizer=plan.optimizer
    )
    buckets = 2 * min(BUCKET, work.parameters.trainable) if plan.gpus > 1 and plan.stage else 0
    gathered = min(LIVE_PARAMETERS, work.parameters.total) if plan.stage == 3 else 0
    return {
        "weights": state.parameter_bytes,
        "gradients": state.gradient_bytes,
        "optimizer": state.optimizer_bytes,
        "buffers": ELEMENT_BYTES * (buckets + gathered),
        "activations": tokens
        * activation_bytes_per_token(work.layers, work.hidden_size, PRECISION, plan.gradient_checkpointing),
    }


def largest_tokens(work: Work, plan: PlanSection, device: Device) -> int:
    """Return the largest token budget, a multiple of 64. It is 0 or less if the state alone does not fit."""
    free_bytes = device.memory_bytes * (1 - MEMORY_RESERVE) - sum(memory_parts(work, plan, 0).values())
    return 64 * math.floor(free_bytes / memory_parts(work, plan, 64)["activations"])


def step_parts(
    work: Work, plan: PlanSection, device: Device, gpus: int, tokens: int, micro_batches: int
) -> dict[str, float]:
    """Return the seconds of an optimizer step by bottleneck. ``tokens`` and ``micro_batches`` are per GPU.

    - Full checkpointing computes the forward pass twice: 4/3 of the FLOPs (Chen et al. 2016). Selective checkpointing
      repeats everything except products and attention.
    - AdamW reads a gradient, reads and writes weight and moments in fp32, and writes the weight.
    - Muon keeps one moment of a matrix. Its five iterations take 30 D FLOPs per element of a matrix (D, D) and 22.5 D
      per element of a matrix (D, 4 D); 25 D is used here.
    - Worker times are assumed normal. Blom 1958 gives the expected maximum of n of them, in standard deviations.
    """
    assume, checkpointing, step_tokens = plan.assume, plan.gradient_checkpointing, tokens * micro_batches
    passes = step_tokens * (4 / 3 if checkpointing is True else 1)
    compute_s = passes * (work.product_flops / PRODUCTS + work.attention_flops / ATTENTION) / device.flops_per_s
    compiled = plan.stage < 3 if plan.compile is None else plan.compile
    vectors = FORWARD_VECTORS[compiled] * (2 if checkpointing else 1) + BACKWARD_VECTORS[compiled]
    moved_bytes = step_tokens * work.layers * vectors * work.hidden_size * ELEMENT_BYTES
    if assume.mfu is not None:
        compute_s = step_tokens * (work.product_flops + work.attention_flops) / assume.mfu / device.flops_per_s
        moved_bytes = 0.0
    memory_bytes_per_s = MEMORY * device.memory_bytes_per_s
    passes_s = compute_s + moved_bytes / memory_bytes_per_s
    _, trainable, matrices = work.parameters
    matrices, workers = matrices if plan.optimizer == "muon" else 0, gpus if plan.stage else 1
    update_bytes = ((28 + ELEMENT_BYTES) * trainable - 8 * matrices) / workers
    update_s = 25 * work.hidden_size * matrices / workers / PRODUCTS / device.flops_per_s
    return {
        "compute": compute_s + update_s,
        "memory bandwidth": (moved_bytes + update_bytes) / memory_bytes_per_s,
        "interconnect": _exposed_s(work, plan, device, gpus, micro_batches, passes_s),
        "slowest worker": passes_s * JITTER * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25)),
    }


def _exposed_s(work: Work, plan: PlanSection, device: Device, gpus: int, micro_batches: int, passes_s: float) -> float:
    """Return the seconds per step in which computation waits for the network.

    Volumes are those in section 7 of Rajbhandari et al. 2020. Gradients are all-reduced and weights gathered; under
    ZeRO-3 weights are gathered twice and gradients scattered. ZeRO-2 of DeepSpeed 0.19.8 also all-reduces
    (use_multi_rank_bucket_allreduce), in each micro-batch. The last bucket can't overlap with computation.
    """
    total, trainable, _ = work.parameters
    network = plan.interconnect
    gbit_per_s = float(network.removeprefix("ib")) if isinstance(network, str) else network
    # The bandwidth of a ring: of the links within a node, or of all adapters of a node, each with its own ring.
    adapters = GPUS_PER_NODE * gbit_per_s * 1e9 / 8 if gpus > GPUS_PER_NODE else math.inf
    bytes_per_s = NETWORK * min(adapters, device.link_bytes_per_s)

    def seconds(passes: int, parameters: int) -> float:
        """Return the seconds of a reduce-scatter or all-gather (one pass), or of an all-reduce (two passes).

        Each pass sends (n - 1) / n of the data, the lower bound for any algorithm (Patarasu and Yuan 2009). Each bucket
        takes log2(n) rounds (Thakur et al. 2005, recursive halving and doubling; NCCL's trees take the same number).
        """
        buckets = math.ceil(parameters / BUCKET)
        sent_bytes = (gpus - 1) / gpus * ELEMENT_BYTES * parameters
        return passes * (sent_bytes / bytes_per_s + buckets * math.log2(gpus) * LATENCY_S)

    reduced, gathered = seconds(2, trainable), seconds(1, total)
    if plan.stage < 2:
        return reduced + gathered * plan.stage
    hidden, after = OVERLAP * passes_s, 0.0
    if plan.stage == 2:
        reduced, hidden, after = micro_batches * reduced, 2 / 3 * hidden, gathered
    else:
        reduced = micro_batches * (2 * gathered + seconds(1, trainable))
    return max(reduced - hidden, reduced * min(1.0, BUCKET / trainable)) + after


def checkpoint_bytes(work: Work, plan: PlanSection) -> tuple[float, float]:
    """Return the bytes of a checkpoint and of the first worker's part. Up to ZeRO-2 that worker also writes all
    weights.

    Weights and both moments are saved in fp32; Muon has one moment per matrix.
    """
    weights = 0 if plan.stage == 3 else ELEMENT_BYTES * work.parameters.total
    state = 12 * work.parameters.trainable - (4 * work.parameters.matrices if plan.optimizer == "muon" else 0)
    return weights + state, weights + state / (plan.gpus if plan.stage else 1)


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the optimal time between checkpoints by Young 1974 (CACM 17:530): sqrt(2 d M) for checkpoints that take
    d."""
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the work time between checkpoints that minimizes the loss (Daly 2006, FGCS 22:303, eq. 37)."""
    share = checkpoint_s / (2 * mtbf_s)
    interval_s = young_interval_s(checkpoint_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - checkpoint_s
    return interval_s if share < 1 else mtbf_s


def lost_share(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the share of time lost to checkpoints, repeated work and restarts (Daly 2006, eq. 20, exponential
    faults)."""
    if restart_s + interval_s + checkpoint_s > 100 * mtbf_s:  # avoids overflow of the exponentials
        return 1.0
    expected_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + checkpoint_s) / mtbf_s)
    return 1 - interval_s / expected_s
