"""Embedding and search on paper: hours, money, bytes and queries per second of proteomes that are not at hand.

In: what a token of the model costs, the peak of a device or a measured rate, and assumptions, each of which is a
setting. Out: values for a number of proteins. Devices work apart, so that hours fall with their number; the store,
the network and the disk are taken to be faster than the devices (docs/embeddings.md has where that ends).
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from esmeray.inference.index.build import num_lists
from esmeray.train_config.section import PositiveFloat, PositiveInt, Precision, Section

BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
CODE_BYTES = 24
"""A row of a compressed index in memory beside its bits: 8 of its number, 16 of RaBitQ's factors and of the lists'
slack (measured: 61 bytes of 320 channels, of which 40 are bits)."""
AT_ROWS = 1_000_000
"""Rows of the index at which ``compressed_queries_per_s`` was measured."""


class EmbeddingAssumptions(Section):
    """Assumptions about devices and search; set what you have measured."""

    mfu: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of the peak that the forward pass reaches (the table of embed run has it)."""
    tokens_per_s: PositiveFloat | None = None
    """Tokens per second of a device, in place of peak and mfu: nearly the residues/s in the table of embed run."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of a device in the precision. Default: that of a known GPU."""
    exact_products_per_s: PositiveFloat = 2.8e10
    """Multiplications and additions per second and core of an exact search, by default those of an AMD Zen 3 (89
    queries/s at 1,000,000 vectors of 320 channels); more where products are in bf16."""
    compressed_queries_per_s: PositiveFloat = 1200.0
    """Queries per second and core of a compressed index of 1,000,000 vectors, by default those of an AMD Zen 3; they
    fall as clusters have more vectors, of which a fixed number is searched."""


class EmbeddingPlanSection(Section):
    """Proteins, model, devices, output and search."""

    proteins: list[PositiveFloat] = Field(default=[1e6, 1e7, 1e8, 1e9, 1e10], min_length=1)
    """Numbers of proteins, a row of the table each."""
    residues: PositiveFloat = 330.0
    """Residues of a protein, in the mean."""
    context: PositiveFloat = 500.0
    """Tokens that a token attends to, in the mean over tokens: more than ``residues``, as long proteins have most."""
    model: str = "esm2_t33_650M"
    """Model, as embed run takes it; of a hub name only config.json is fetched."""
    gpu: str = "H100"
    """B200, H200, H100, A100, L40S or another name that nvidia-smi shows; any name with --plan.assume.tokens_per_s."""
    devices: PositiveInt = 8
    """Number of devices that compute, each a share of the proteins."""
    precision: Precision = "bf16"
    """Precision of the computation."""
    price: PositiveFloat = 2.5
    """Price of a device for an hour, in any currency."""
    output: Literal["mean", "residues"] = "mean"
    """A vector for each protein, or for each residue."""
    dtype: Literal["fp32", "fp16", "int8"] = "fp16"
    """Type of the numbers that are written."""
    index: Literal["exact", "compressed"] = "compressed"
    """Kind of the index of a vector a protein."""
    cores: PositiveInt = 16
    """Number of cores that search, each a share of the queries."""
    json_output: str | None = None
    """JSON file for the values. Default: none."""
    assume: EmbeddingAssumptions = EmbeddingAssumptions()


class Cost(NamedTuple):
    """Costs of a model: FLOP of a token, and of a token for each that it attends to; channels of its vectors."""

    flops_per_token: float
    attention_flops: float
    channels: int


class Forecast(NamedTuple):
    """Values for a number of proteins; ``memory_bytes`` are the index's while it is searched."""

    proteins: float
    hours: float
    money: float
    vector_bytes: float
    index_bytes: float
    memory_bytes: float
    queries_per_s: float


def tokens_per_s(plan: EmbeddingPlanSection, cost: Cost, peak_tflops: float) -> float:
    """Tokens per second of a device: its peak, times the share of it that is reached, by the FLOP of a token."""
    flops = cost.flops_per_token + cost.attention_flops * plan.context
    return plan.assume.tokens_per_s or 1e12 * peak_tflops * plan.assume.mfu / flops


def _cluster_rows(rows: float, channels: int) -> float:
    return rows / num_lists(int(rows), channels)


def forecast(plan: EmbeddingPlanSection, cost: Cost, rate: float, proteins: float) -> Forecast:
    """Values for so many proteins, at ``rate`` tokens per second and device."""
    hours = proteins * (plan.residues + 2) / (rate * plan.devices) / 3600  # two special tokens a protein
    rows = proteins * (plan.residues if plan.output == "residues" else 1)
    if plan.index == "exact":
        memory_bytes = proteins * 4 * cost.channels
        index_bytes = proteins * 6 * cost.channels  # fp32 and the filter in bf16
        core_queries = plan.assume.exact_products_per_s / (proteins * cost.channels)
    else:
        memory_bytes = proteins * (cost.channels / 8 + CODE_BYTES)
        index_bytes = memory_bytes + proteins * 2 * cost.channels  # fp16 values, by which the best are scored again
        smaller = _cluster_rows(AT_ROWS, cost.channels) / _cluster_rows(proteins, cost.channels)
        core_queries = plan.assume.compressed_queries_per_s * smaller
    return Forecast(
        proteins,
        hours,
        hours * plan.devices * plan.price,
        rows * cost.channels * BYTES[plan.dtype],
        index_bytes,
        memory_bytes,
        core_queries * plan.cores,
    )
