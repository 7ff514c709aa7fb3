"""Scale on paper: memory, seconds of a step, checkpoints and faults of a run on a cluster that is not at hand.

In: what a token costs, the peaks of a GPU, the settings of a plan. Out: bytes and seconds, by formulas whose sources
are named. Left out: loading, validation, tensor and pipeline parallelism, which this project does not have.
"""

import math
from statistics import NormalDist
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from esmeray.model.cost.memory import ParameterCount, activation_bytes_per_token, estimate_memory
from esmeray.train_config.section import NonNegativeFloat, PositiveFloat, PositiveInt, Precision, Section, Share, Tokens

BUCKET = 50_000_000
"""Elements of a bucket (reduce_bucket_size of train_config/zero2.yaml, stage3_prefetch_bucket_size of DeepSpeed)."""
LIVE_PARAMETERS = 1_000_000_000
"""Parameters that ZeRO-3 of DeepSpeed 0.19.8 gathers at most."""
PRODUCTS, ATTENTION, MEMORY = 0.8, 0.35, 0.83
"""Shares of a GPU's peaks that large products, FlashAttention and fused kernels reach (docs/gpu.md)."""
LATENCY_S = 1e-5
"""Of a round of a collective between nodes."""
FORWARD_VECTORS, BACKWARD_VECTORS = {True: 21.1, False: 66.4}, {True: 35.3, False: 91.4}
"""Vectors of hidden_size channels that a token moves in a layer beside products and attention, compiled or not: counted
in the kernels of ESM-2 650M (docs/gpu.md)."""


class PlanAssumptions(Section):
    """Assumptions about cluster and GPUs; set what you have measured."""

    mfu: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the peak that forward and backward pass reach (throughput/mfu of a run). Default: products at 80 % of
    the peak, attention at 35 %, everything else at 83 % of the memory's speed."""
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


class Work(NamedTuple):
    """A model, and operations of forward and backward pass for a token."""

    parameters: ParameterCount
    layers: int
    hidden_size: int
    product_flops: float
    attention_flops: float


class Device(NamedTuple):
    """Peaks of a GPU, and of the link to the others of its node in one direction."""

    flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float


def memory_parts(work: Work, plan: PlanSection, tokens: int) -> dict[str, float]:
    """Bytes on a GPU at a token budget, by part."""
    state = estimate_memory(
        work.parameters, stage=plan.stage, world_size=plan.gpus, precision=plan.precision, optimizer=plan.optimizer
    )
    buckets = 2 * min(BUCKET, work.parameters.trainable) if plan.gpus > 1 and plan.stage else 0
    gathered = min(LIVE_PARAMETERS, work.parameters.total) if plan.stage == 3 else 0
    size = work.layers, work.hidden_size, plan.precision, plan.gradient_checkpointing
    return {
        "weights": state.parameter_bytes,
        "gradients": state.gradient_bytes,
        "optimizer": state.optimizer_bytes,
        "buffers": _element_bytes(plan) * (buckets + gathered),
        "activations": tokens * activation_bytes_per_token(*size),
    }


def largest_tokens(work: Work, plan: PlanSection, device: Device) -> int:
    """The largest token budget, a multiple of 64; 0 or less where the state alone does not fit."""
    free_bytes = device.memory_bytes * (1 - plan.assume.memory_reserve) - sum(memory_parts(work, plan, 0).values())
    return 64 * math.floor(free_bytes / memory_parts(work, plan, 64)["activations"])


def step_parts(
    work: Work, plan: PlanSection, device: Device, gpus: int, tokens: int, micro_batches: int
) -> dict[str, float]:
    """Seconds of an optimizer step by what binds them; ``tokens`` and ``micro_batches`` of each GPU.

    Full checkpointing computes the forward pass twice: four thirds of the operations (Chen et al. 2016). The selective
    kind repeats what is neither product nor attention. AdamW reads a gradient, reads and writes weight and moments in
    fp32, and writes the weight. Muon keeps one moment of a matrix, and its five iterations take 30 D operations an
    element of a matrix (D, D), 22.5 D of one (D, 4 D): 25 D here. Of n workers with normal times the slowest takes so
    many standard deviations more as Blom 1958 gives for the largest of n.
    """
    assume, checkpointing, step_tokens = plan.assume, plan.gradient_checkpointing, tokens * micro_batches
    passes = step_tokens * (4 / 3 if checkpointing is True else 1)
    compute_s = passes * (work.product_flops / PRODUCTS + work.attention_flops / ATTENTION) / device.flops_per_s
    compiled = plan.stage < 3 if plan.compile is None else plan.compile
    vectors = FORWARD_VECTORS[compiled] * (2 if checkpointing else 1) + BACKWARD_VECTORS[compiled]
    moved_bytes = step_tokens * work.layers * vectors * work.hidden_size * _element_bytes(plan)
    if assume.mfu is not None:
        compute_s = step_tokens * (work.product_flops + work.attention_flops) / assume.mfu / device.flops_per_s
        moved_bytes = 0.0
    memory_bytes_per_s = MEMORY * device.memory_bytes_per_s
    passes_s = compute_s + moved_bytes / memory_bytes_per_s
    _, trainable, matrices = work.parameters
    matrices, workers = matrices if plan.optimizer == "muon" else 0, gpus if plan.stage else 1
    update_bytes = ((28 + 2 * (plan.precision != "fp32")) * trainable - 8 * matrices) / workers
    update_s = 25 * work.hidden_size * matrices / workers / PRODUCTS / device.flops_per_s
    return {
        "compute": compute_s + update_s,
        "memory bandwidth": (moved_bytes + update_bytes) / memory_bytes_per_s,
        "interconnect": _exposed_s(work, plan, device, gpus, micro_batches, passes_s),
        "slowest worker": passes_s * assume.jitter * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25)),
    }


def collective_s(passes: int, size_bytes: float, gpus: int, bytes_per_s: float) -> float:
    """Seconds of a reduce-scatter or all-gather (one pass), or an all-reduce (two).

    Each pass sends (n - 1) / n of the data, which no algorithm undercuts (Patarasu and Yuan 2009), in log2(n) rounds
    (Thakur et al. 2005, recursive halving and doubling; NCCL's trees take as many).
    """
    return passes * ((gpus - 1) / gpus * size_bytes / bytes_per_s + math.log2(gpus) * LATENCY_S)


def bus_bytes_per_s(plan: PlanSection, device: Device, gpus: int) -> float:
    """Speed of a ring: of a node's links, or between nodes of all its adapters, each of which has a ring of its own."""
    network = plan.interconnect
    gbit_per_s = float(network.removeprefix("ib")) if isinstance(network, str) else network
    adapters = plan.gpus_per_node * gbit_per_s * 1e9 / 8 if gpus > plan.gpus_per_node else math.inf
    link = device.link_bytes_per_s if plan.gpus_per_node > 1 else math.inf
    return plan.assume.network * min(adapters, link)


def _exposed_s(work: Work, plan: PlanSection, device: Device, gpus: int, micro_batches: int, passes_s: float) -> float:
    """Seconds in which a step waits for the network alone.

    Volumes of Rajbhandari et al. 2020, section 7: gradients all-reduced and weights gathered; under ZeRO-3 weights
    gathered twice and gradients scattered. ZeRO-2 of DeepSpeed 0.19.8 all-reduces too (use_multi_rank_bucket_allreduce)
    and does so in each micro-batch. The last bucket has no pass left beside it.
    """
    total, trainable, _ = work.parameters
    bytes_per_s = bus_bytes_per_s(plan, device, gpus)

    def seconds(passes: int, parameters: int) -> float:
        buckets = math.ceil(parameters / BUCKET)
        return buckets * collective_s(passes, _element_bytes(plan) * parameters / buckets, gpus, bytes_per_s)

    reduced, gathered = seconds(2, trainable), seconds(1, total)
    if plan.stage < 2:
        return reduced + gathered * plan.stage
    hidden, after = plan.assume.overlap * passes_s, 0.0
    if plan.stage == 2:
        reduced, hidden, after = micro_batches * reduced, 2 / 3 * hidden, gathered
    else:
        reduced = micro_batches * (2 * gathered + seconds(1, trainable))
    return max(reduced - hidden, reduced * min(1.0, BUCKET / trainable)) + after


def checkpoint_bytes(work: Work, plan: PlanSection) -> tuple[float, float]:
    """Bytes of a checkpoint, and of the first worker's part: up to ZeRO-2 it writes all weights beside its share.

    Weights and both moments are saved in fp32; Muon has one of a matrix.
    """
    weights = 0 if plan.stage == 3 else _element_bytes(plan) * work.parameters.total
    state = 12 * work.parameters.trainable - (4 * work.parameters.matrices if plan.optimizer == "muon" else 0)
    return weights + state, weights + state / (plan.gpus if plan.stage else 1)


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Young 1974 (CACM 17:530): sqrt(2 d M) between checkpoints that take d."""
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Daly 2006 (FGCS 22:303, eq. 37): the time of work between checkpoints that loses least."""
    share = checkpoint_s / (2 * mtbf_s)
    interval_s = young_interval_s(checkpoint_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - checkpoint_s
    return interval_s if share < 1 else mtbf_s


def lost_share(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time lost to checkpoints, work done again and restarts (Daly 2006, eq. 20, exponential faults)."""
    if restart_s + interval_s + checkpoint_s > 100 * mtbf_s:  # the exponentials would overflow
        return 1.0
    expected_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + checkpoint_s) / mtbf_s)
    return 1 - interval_s / expected_s


def _element_bytes(plan: PlanSection) -> int:
    return 4 if plan.precision == "fp32" else 2
