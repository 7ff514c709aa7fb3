"""Plan the embedding and the search of many proteins: hours, cost, bytes and queries per second.

Nothing is embedded and no device is needed. Values are computed from the model's FLOP and from assumptions. Replace
assumptions with your measurements: --plan.assume.tokens_per_s with the rate of a device in the table of embed run, or
--plan.assume.mfu with its MFU. docs/embeddings.md has the formulas, and compares the values with published ones.

Examples:
  esmeray embed plan --plan.model esm2_t36_3B --plan.gpu h200 --plan.devices 64 --plan.price 3.2
  esmeray embed plan --plan.proteins 6.8e9 --plan.gpu a100 --plan.output residues --plan.dtype int8
  esmeray embed plan --plan.model esm2_t6_8M --plan.gpu laptop --plan.devices 1 --plan.assume.tokens_per_s 25000
"""

from rich.table import Table

from esmeray.common.command_line import result_console
from esmeray.common.errors import ConfigError, expanded
from esmeray.common.text import did_you_mean, duration
from esmeray.inference.embedding.forecast import Cost, EmbeddingPlanSection, Forecast, forecast, tokens_per_s
from esmeray.model.section import BackboneSection
from esmeray.tools.grammar import OutputWriter, command

_UNITS = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"))


@command("embed plan", __doc__, made_by="embed plan")
def main(plan: EmbeddingPlanSection, writer: OutputWriter) -> None:
    output = expanded(plan.json_output) if plan.json_output else None
    writer.refuse_file(output)
    cost = cost_of(plan.model)
    rate = tokens_per_s(plan, cost, 0.0 if plan.assume.tokens_per_s else _peak_tflops(plan))
    rows = [forecast(plan, cost, rate, proteins) for proteins in plan.proteins]
    result_console().print(_table(plan, rate, rows))
    values = {"tokens_per_s": rate, "rows": [row._asdict() for row in rows]}
    writer.write_json(output, {"settings": plan.model_dump(mode="json"), **values})


def cost_of(model: str) -> Cost:
    """Cost per token of the model. Raises ConfigError or ResourceError."""
    # Imported here: they load torch, which the help does not need.
    from esmeray.model.backbones.loading import build_backbone
    from esmeray.model.cost.flops import forward_flops

    backbone = build_backbone(BackboneSection(source=model), seed=0, empty=True)
    return Cost(*forward_flops(backbone), backbone.hidden_size)


def _peak_tflops(plan: EmbeddingPlanSection) -> float:
    from esmeray.monitoring.sampling.peaks import known_gpus, peak_tflops  # here: it loads torch

    peak = peak_tflops(plan.gpu, plan.precision)
    if peak is None:
        gpus = known_gpus()
        raise ConfigError(
            f"plan.gpu: {plan.gpu!r} has no known peak in {plan.precision}{did_you_mean(plan.gpu, gpus)}; use "
            f"one of {', '.join(gpus)}, or give --plan.assume.tokens_per_s"
        )
    return peak


def _table(plan: EmbeddingPlanSection, rate: float, rows: list[Forecast]) -> Table:
    title = (
        f"{plan.model} on {plan.devices:,} x {plan.gpu}, {plan.precision}, {rate:,.0f} tokens/s each; {plan.output} in "
        f"{plan.dtype}; {plan.index} index, {plan.cores} cores"
    )
    table = Table(title=title, title_justify="left", box=None)
    for name in ("proteins", "time", "money", "vectors", "index", "index in memory", "queries/s"):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = map(_size, (row.vector_bytes, row.index_bytes, row.memory_bytes))
        spent = duration(3600 * row.hours), f"{row.money:,.0f}"
        table.add_row(f"{row.proteins:,.3g}", *spent, *sizes, f"{row.queries_per_s:,.3g}")
    return table


def _size(size_bytes: float) -> str:
    for unit_bytes, unit in _UNITS:
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:,.3g} {unit}"
    return f"{size_bytes:,.0f} bytes"
