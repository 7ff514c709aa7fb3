"""Forecast hours, cost, bytes and queries per second of embedding and searching proteomes.

Inputs are the model's cost per token, a device's peak or a measured rate, and assumptions, which are settings. Outputs
are values per number of proteins. Devices work independently, so hours are inversely proportional to their number. The
store, network and disk are assumed to be faster than the devices (docs/embeddings.md gives the limits).
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from esmeray.inference.index.build import num_lists
from esmeray.train_config.section import PositiveFloat, PositiveInt, Precision, Section

BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
CODE_BYTES = 24
"""Bytes in memory per row of a compressed index, in addition to its bits.

8 for the row number, 16 for RaBitQ's factors and list overhead.

Measured: 61 bytes per row for 320 channels, including 40 bytes of bits.
"""
EXACT_PRODUCTS_PER_S = 2.8e10
"""Multiply-adds per second and core of an exact search. Measured on AMD Zen 3 (89 queries/s for 1,000,000 vectors of
320 channels); higher with bf16 products.
"""
COMPRESSED_QUERIES_PER_S, AT_ROWS = 1200.0, 1_000_000
"""Queries per second and core of a compressed index, and the number of its vectors. Measured on AMD Zen 3. The rate
falls with larger clusters, because a fixed number of clusters is searched.
"""


class EmbeddingAssumptions(Section):
    """Assumptions about devices. Replace them with your own measurements."""

    mfu: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of the peak that the forward pass reaches (reported in the table of embed run)."""
    tokens_per_s: PositiveFloat | None = None
    """Tokens per second of a device, instead of peak and mfu: about the residues/s in the table of embed run."""


class EmbeddingPlanSection(Section):
    """Proteins, model, devices, output and search."""

    proteins: list[PositiveFloat] = Field(default=[1e6, 1e7, 1e8, 1e9, 1e10], min_length=1)
    """Numbers of proteins, one table row each."""
    residues: PositiveFloat = 330.0
    """Mean residues per protein."""
    context: PositiveFloat = 500.0
    """Mean number of tokens that a token attends to. It exceeds ``residues``: long proteins hold most tokens."""
    model: str = "esm2_t33_650M"
    """Model, as in embed run. For a hub name only config.json is downloaded."""
    gpu: str = "H100"
    """GPU: B200, H200, H100, A100, L40S or another name from nvidia-smi; any name with --plan.assume.tokens_per_s."""
    devices: PositiveInt = 8
    """Number of devices that share the proteins."""
    precision: Precision = "bf16"
    """Precision of the computation."""
    price: PositiveFloat = 2.5
    """Price per device and hour, in any currency."""
    output: Literal["mean", "residues"] = "mean"
    """Output: a vector per protein (mean) or per residue (residues)."""
    dtype: Literal["fp32", "fp16", "int8"] = "fp16"
    """Data type of the written vectors."""
    index: Literal["exact", "compressed"] = "compressed"
    """Kind of the index, which has one vector per protein."""
    cores: PositiveInt = 16
    """Number of CPU cores that share the queries."""
    json_output: str | None = None
    """JSON file for the values. Default: none."""
    assume: EmbeddingAssumptions = EmbeddingAssumptions()


class Cost(NamedTuple):
    """Costs of a model: FLOP per token, FLOP of attention per pair of tokens, and channels of its vectors."""

    flops_per_token: float
    attention_flops: float
    channels: int


class Forecast(NamedTuple):
    """Values for a number of proteins; ``memory_bytes`` is the memory of the index during search."""

    proteins: float
    hours: float
    money: float
    vector_bytes: float
    index_bytes: float
    memory_bytes: float
    queries_per_s: float


def tokens_per_s(plan: EmbeddingPlanSection, cost: Cost, peak_tflops: float) -> float:
    """Tokens per second of a device: the reached share of its peak, divided by the FLOP per token."""
    flops = cost.flops_per_token + cost.attention_flops * plan.context
    return plan.assume.tokens_per_s or 1e12 * peak_tflops * plan.assume.mfu / flops


def _cluster_rows(rows: float, channels: int) -> float:
    return rows / num_lists(int(rows), channels)


def forecast(plan: EmbeddingPlanSection, cost: Cost, rate: float, proteins: float) -> Forecast:
    """Forecast the values for a number of proteins, at ``rate`` tokens per second and device."""
    hours = proteins * (plan.residues + 2) / (rate * plan.devices) / 3600  # two special tokens per protein
    rows = proteins * (plan.residues if plan.output == "residues" else 1)
    if plan.index == "exact":
        memory_bytes = proteins * 4 * cost.channels
        index_bytes = proteins * 6 * cost.channels  # fp32 and the bf16 filter
        core_queries = EXACT_PRODUCTS_PER_S / (proteins * cost.channels)
    else:
        memory_bytes = proteins * (cost.channels / 8 + CODE_BYTES)
        index_bytes = memory_bytes + proteins * 2 * cost.channels  # fp16 values, which score the best rows again
        smaller = _cluster_rows(AT_ROWS, cost.channels) / _cluster_rows(proteins, cost.channels)
        core_queries = COMPRESSED_QUERIES_PER_S * smaller
    return Forecast(
        proteins,
        hours,
        hours * plan.devices * plan.price,
        rows * cost.channels * BYTES[plan.dtype],
        index_bytes,
        memory_bytes,
        core_queries * plan.cores,
    )
