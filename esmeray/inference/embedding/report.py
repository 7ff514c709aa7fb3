"""Performance report of an embedding job from the rows of its shards, over all starts, as JSON and as a table."""

import platform
from collections.abc import Sequence
from importlib.metadata import version
from statistics import fmean, pstdev
from typing import Any

from rich.table import Column, Table

from esmeray.common.text import duration
from esmeray.inference.embedding.plan import JobFacts, Plan
from esmeray.inference.embedding.section import EmbedJobSection
from esmeray.inference.embedding.shard_files import ShardRow
from esmeray.monitoring.sampling.peaks import peak_tflops


def performance(
    facts: JobFacts, plan: Plan, rows: Sequence[ShardRow], settings: EmbedJobSection, changes: Sequence[str]
) -> dict[str, Any]:
    """Report on one model.

    ``changes``: lines about residues or records that ingest changed or left out. Rates cover the computed shards. They
    and ``seconds`` are per device, because each start of a job may have another number of workers. Without computed
    shards, rates, times and memory are None.
    """
    computed = [row for row in rows if not row.cached]  # cached shards cost no computation
    cached = sum(row.sequences for row in rows if row.cached)
    records = plan.sequences.size
    times_s = [batch_s for row in computed for batch_s in row.batch_s]
    statistics = None
    if times_s:
        statistics = {"mean": fmean(times_s), "deviation": pstdev(times_s), "min": min(times_s), "max": max(times_s)}
    summed = ("batches", "splits", "seconds", "residues", "tokens", "sequences", "flops")
    sums = {name: sum(getattr(row, name) for row in computed) for name in summed}

    # Without loading the model and writing the final files, whose cost does not grow with the job.
    def rate(name: str) -> float | None:
        return sums[name] / sums["seconds"] if computed else None

    flops_per_s = rate("flops")
    peak = peak_tflops(facts.device_name, settings.precision or "fp32")
    return {
        "model": facts.name,
        "fingerprint": facts.fingerprint,
        "random_weights": facts.random_weights,
        "device": facts.device_name,
        "workers": settings.workers or 1,
        "precision": settings.precision,
        "batch_tokens": plan.budget,
        "changes_of_input": list(changes),
        "long_policy": settings.long,
        "versions": {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")},
        "proteins": records,
        "distinct_sequences": plan.num_sequences,
        "computed_sequences": plan.num_sequences - cached,
        "duplicates": records - plan.num_sequences,
        # Over distinct sequences, because duplicates need no cache.
        "cache_hit_rate": cached / plan.num_sequences,
        "long_sequences": plan.long_sequences,
        "residues_left_out": plan.residues_left_out,
        "batch_s": statistics,  # after the warm-up
        "batches": sums["batches"],
        "batches_split_for_memory": sums["splits"],
        "memory_peak_bytes": max((row.peak_bytes for row in computed), default=None),
        "memory_mean_bytes": round(fmean(row.mean_bytes for row in computed)) if computed else None,
        "seconds": sums["seconds"],
        "residues": sums["residues"],
        "tokens": sums["tokens"],
        "peak_tflops": peak,
        "flops_utilization": None if peak is None or flops_per_s is None else flops_per_s / (peak * 1e12),
        "proteins_per_s": rate("sequences"),
        "residues_per_s": rate("residues"),
        "tokens_per_s": rate("tokens"),
        "flops_per_s": flops_per_s,
    }


def table(reports: Sequence[dict[str, Any]]) -> Table:
    """Table with a row per model."""
    rates = ("proteins/s\nper device", "residues/s\nper device")
    names = ("proteins", "device\ntime", *rates, "batch", "peak memory", "MFU", "cached")
    shown = Table("model", *[Column(name, justify="right") for name in names], box=None, padding=(0, 2, 0, 0))
    for report in reports:
        batch = report["batch_s"]
        shown.add_row(
            report["model"],
            f"{report['proteins']:,}",
            duration(report["seconds"]),
            _number(report["proteins_per_s"]),
            _number(report["residues_per_s"]),
            f"{1e3 * batch['mean']:.0f} ± {1e3 * batch['deviation']:.0f} ms" if batch else "",
            _number(report["memory_peak_bytes"], " MB", 1e6),
            _number(report["flops_utilization"], "%", 0.01),
            f"{report['cache_hit_rate']:.0%}",
        )
    return shown


def _number(value: float | None, unit: str = "", size: float = 1.0) -> str:
    return "" if value is None else f"{value / size:,.0f}{unit}"
