"""Plan the embedding and the search of many proteins: hours, cost, bytes and queries per second.

Nothing is embedded and no device is needed. Values are computed from the model's FLOP and from assumptions. Replace
assumptions with your measurements: --plan.assume.tokens_per_s with the rate of a device in the table of embed run, or
--plan.assume.mfu with its MFU. docs/embeddings.md has the formulas, and compares the values with published ones.

Devices work independently, so hours are inversely proportional to their number. The store, network and disk are assumed
to be faster than the devices.

Examples:
  esmeray embed plan --plan.model esm2_t36_3B --plan.gpu h200 --plan.devices 64 --plan.price 3.2
  esmeray embed plan --plan.gpu a100 --plan.output residues
  esmeray embed plan --plan.model esm2_t6_8M --plan.gpu laptop --plan.devices 1 --plan.assume.tokens_per_s 25000
"""

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field
from rich.filesize import decimal
from rich.table import Table

from esmeray.common.command_line import result_console
from esmeray.common.errors import ConfigError, did_you_mean
from esmeray.common.text import duration
from esmeray.inference.index.build import num_lists
from esmeray.model.section import BackboneSection
from esmeray.tools.grammar import command
from esmeray.train_config.section import PositiveFloat, PositiveInt, Precision, Section

if TYPE_CHECKING:
    from esmeray.model.backbones.base import PackedBackbone

PROTEINS = (1e6, 1e7, 1e8, 1e9, 1e10)
"""Numbers of proteins, one table row each."""
RESIDUES = 330
"""Mean residues per protein."""
CONTEXT = 500
"""Mean number of tokens that a token attends to. It exceeds RESIDUES: long proteins hold most tokens."""
PRECISION: Precision = "bf16"
CORES = 16
"""CPU cores that share the queries."""
VECTOR_BYTES = 2
"""Bytes per value of the written vectors, which are fp16."""
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
    """Model, devices, output and search."""

    model: str = "esm2_t33_650M"
    """Model, as in embed run. For a hub name only config.json is downloaded."""
    gpu: str = "H100"
    """GPU: B200, H200, H100, A100, L40S or another name from nvidia-smi; any name with --plan.assume.tokens_per_s."""
    devices: PositiveInt = 8
    """Number of devices that share the proteins."""
    price: PositiveFloat = 2.5
    """Price per device and hour, in any currency."""
    output: Literal["mean", "residues"] = "mean"
    """Output: a vector per protein (mean) or per residue (residues)."""
    index: Literal["exact", "compressed"] = "compressed"
    """Kind of the index, which has one vector per protein."""
    assume: EmbeddingAssumptions = EmbeddingAssumptions()


class Forecast(NamedTuple):
    """Values for a number of proteins; ``memory_bytes`` is the memory of the index during search."""

    proteins: float
    hours: float
    money: float
    vector_bytes: float
    index_bytes: float
    memory_bytes: float
    queries_per_s: float


@command("embed plan", __doc__)
def main(plan: EmbeddingPlanSection) -> None:
    backbone = without_weights(plan.model)
    rate = tokens_per_s(plan, backbone)
    rows = [forecast(plan, backbone.hidden_size, rate, proteins) for proteins in PROTEINS]
    result_console().print(_table(plan, rate, rows))


def without_weights(model: str) -> "PackedBackbone":
    """Return the model's modules, without memory for weights. Raises ConfigError or ResourceError."""
    from esmeray.model.backbones.loading import build_backbone  # here: it loads torch, which the help does not need

    return build_backbone(BackboneSection(source=model), seed=0, empty=True)


def tokens_per_s(plan: EmbeddingPlanSection, backbone: "PackedBackbone") -> float:
    """Tokens per second of a device: as measured, or the reached share of its peak, divided by the FLOP per token."""
    if plan.assume.tokens_per_s is not None:
        return plan.assume.tokens_per_s
    from esmeray.model.cost.flops import forward_flops  # here: these load torch
    from esmeray.monitoring.sampling.peaks import known_gpus, peak_tflops

    peak = peak_tflops(plan.gpu, PRECISION)
    if peak is None:
        gpus = known_gpus(PRECISION)
        raise ConfigError(
            f"plan.gpu: {plan.gpu!r} has no known peak in {PRECISION}{did_you_mean(plan.gpu, gpus)}; use "
            f"one of {', '.join(gpus)}, or give --plan.assume.tokens_per_s"
        )
    per_token, per_pair = forward_flops(backbone)
    return 1e12 * peak * plan.assume.mfu / (per_token + per_pair * CONTEXT)


def forecast(plan: EmbeddingPlanSection, channels: int, rate: float, proteins: float) -> Forecast:
    """Forecast the values for a number of proteins, at ``rate`` tokens per second and device."""
    hours = proteins * (RESIDUES + 2) / (rate * plan.devices) / 3600  # two special tokens per protein
    rows = proteins * (RESIDUES if plan.output == "residues" else 1)
    if plan.index == "exact":
        memory_bytes = proteins * 4 * channels
        index_bytes = proteins * 6 * channels  # fp32 and the bf16 filter
        core_queries = EXACT_PRODUCTS_PER_S / (proteins * channels)
    else:
        memory_bytes = proteins * (channels / 8 + CODE_BYTES)
        index_bytes = memory_bytes + proteins * 2 * channels  # fp16 values, which score the best rows again
        smaller = _cluster_rows(AT_ROWS, channels) / _cluster_rows(proteins, channels)
        core_queries = COMPRESSED_QUERIES_PER_S * smaller
    return Forecast(
        proteins,
        hours,
        hours * plan.devices * plan.price,
        rows * channels * VECTOR_BYTES,
        index_bytes,
        memory_bytes,
        core_queries * CORES,
    )


def _cluster_rows(rows: float, channels: int) -> float:
    return rows / num_lists(int(rows), channels)


def _table(plan: EmbeddingPlanSection, rate: float, rows: list[Forecast]) -> Table:
    title = (
        f"{plan.model} on {plan.devices:,} x {plan.gpu}, {PRECISION}, {rate:,.0f} tokens/s each; {plan.output} in "
        f"fp16; {plan.index} index, {CORES} cores"
    )
    table = Table(title=title, title_justify="left", box=None)
    for name in ("proteins", "time", "money", "vectors", "index", "index in memory", "queries/s"):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = [decimal(round(size_bytes)) for size_bytes in (row.vector_bytes, row.index_bytes, row.memory_bytes)]
        spent = duration(3600 * row.hours), f"{row.money:,.0f}"
        table.add_row(f"{row.proteins:,.3g}", *spent, *sizes, f"{row.queries_per_s:,.3g}")
    return table
