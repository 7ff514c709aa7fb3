"""Performance report of an embedding job from the rows of its shards, over all starts, as JSON and as a table."""

import platform
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

import numpy
import torch
from pydantic import BaseModel
from rich.table import Column, Table

from esmeray.common.text import duration
from esmeray.inference.embedding.plan import JobFacts, Plan
from esmeray.inference.embedding.section import EmbedJobSection
from esmeray.inference.embedding.shard_files import ShardRow
from esmeray.monitoring.sampling.peaks import peak_tflops


class Spent(BaseModel):
    """Time over all starts of a job: in total, and for computing shards."""

    starts: int = 0
    seconds: float = 0.0
    computing_s: float = 0.0


def report_name(device: str) -> str:
    """File name of a job's report on this kind of device."""
    return f"embedding_performance_report_{device}.json"


def performance(
    facts: JobFacts,
    plan: Plan,
    rows: Sequence[ShardRow],
    settings: EmbedJobSection,
    spent: Spent,
    changes: Sequence[str] = (),
) -> dict[str, Any]:
    """Report on one model.

    ``changes``: lines about residues or records that ingest changed or left out. Rates cover the computed shards, over
    the seconds in which workers computed.
    """
    workers = settings.workers or 1
    computed = [row for row in rows if not row.cached]  # cached shards cost no computation
    # Without loading the model and writing the final files, whose cost does not grow with the job.
    busy_s = spent.computing_s
    residues, tokens = sum(row.residues for row in computed), sum(row.tokens for row in computed)
    sequences, records = sum(row.sequences for row in computed), plan.sequences.size
    peak = peak_tflops(facts.device_name, settings.precision or "fp32")
    # FLOP of all workers over one wall time, to be compared with the peak of the same number of devices.
    flops_per_s = sum(row.flops for row in computed) / busy_s if busy_s else 0.0
    return {
        "model": facts.name,
        "fingerprint": facts.fingerprint,
        "random_weights": facts.random_weights,
        "device": facts.device_name,
        "workers": workers,
        "precision": settings.precision,
        "batch_tokens": plan.budget,
        "proteins": records,
        "changes_of_input": list(changes),
        "distinct_sequences": plan.num_sequences,
        "computed_sequences": sequences,
        "duplicates": records - plan.num_sequences,
        # Over distinct sequences, because duplicates need no cache.
        "cache_hit_rate": sum(row.sequences for row in rows if row.cached) / plan.num_sequences,
        "long_sequences": plan.long_sequences,
        "long_policy": settings.long,
        "residues_left_out": plan.residues_left_out,
        "seconds": spent.seconds,
        "starts": spent.starts,
        "computing_s": busy_s,
        "proteins_per_s": sequences / busy_s if busy_s else None,
        "residues_per_s": residues / busy_s if busy_s else None,
        "tokens_per_s": tokens / busy_s if busy_s else None,
        "residues": residues,
        "tokens": tokens,
        "batch_s": _statistics([batch_s for row in computed for batch_s in row.batch_s]),
        "batches": sum(row.batches for row in computed),
        "batches_split_for_memory": sum(row.splits for row in computed),
        "memory_peak_bytes": max((row.peak_bytes for row in computed), default=None),
        "memory_mean_bytes": round(fmean(row.mean_bytes for row in computed)) if computed else None,
        "flops_per_s": flops_per_s,
        "peak_tflops": peak,
        "flops_utilization": flops_per_s / (peak * 1e12 * workers) if peak else None,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__},
    }


def table(reports: Sequence[dict[str, Any]]) -> Table:
    """Table with a row per model."""
    names = ("proteins", "time", "proteins/s", "residues/s", "batch", "peak memory", "MFU", "cached")
    shown = Table("model", *[Column(name, justify="right") for name in names], box=None, padding=(0, 2, 0, 0))
    for report in reports:
        batch, share = report["batch_s"], report["flops_utilization"]
        shown.add_row(
            report["model"],
            f"{report['proteins']:,}",
            duration(report["seconds"]),
            _number(report["proteins_per_s"]),
            _number(report["residues_per_s"]),
            f"{1e3 * batch['mean']:.0f} ± {1e3 * batch['deviation']:.0f} ms" if batch else "",
            "" if report["memory_peak_bytes"] is None else f"{report['memory_peak_bytes'] / 1e6:,.0f} MB",
            "" if share is None else f"{share:.0%}",
            f"{report['cache_hit_rate']:.0%}",
        )
    return shown


def _statistics(values: list[float]) -> dict[str, float] | None:
    """Statistics of the batch times after the warm-up."""
    return (
        {"mean": fmean(values), "deviation": pstdev(values), "min": min(values), "max": max(values)} if values else None
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
