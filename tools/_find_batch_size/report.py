"""The result for a person: a table of budgets, and which keys to set."""

from __future__ import annotations

from rich.table import Table

from training.engine.memory_meter import mib
from tuning.budgets import Found


def table(found: Found) -> Table:
    """A row a budget."""
    columns = Table(box=None, pad_edge=False)
    for name in ("batch.tokens", "tokens/s", "peak memory", "fits"):
        columns.add_column(name, justify="right" if name != "fits" else "left")
    columns.add_column("")
    results, expected_bytes = found.budgets.results, found.budgets.expected_bytes
    for tokens in sorted(results.keys() | expected_bytes):
        if tokens not in results:
            columns.add_row(f"{tokens:,}", "", f"~ {mib(expected_bytes[tokens])}", "no", "not tried")
            continue
        measurement = results[tokens]
        speed, peak = measurement.tokens_per_s, measurement.peak_memory_bytes
        columns.add_row(
            f"{tokens:,}",
            "" if speed is None else f"{speed:,.0f}",
            "" if peak is None else mib(peak),
            "yes" if tokens in found.fitting else "no",
            "" if measurement.status == "ok" else measurement.reason,
        )
    return columns


def advice(found: Found, global_tokens: int, workers: int, memory_margin: float, inference: bool) -> list[str]:
    """Lines that say which budget is the largest and which the fastest, and what to set.

    Args:
        found: of whose budgets some fits.
        global_tokens: that the config has.
        workers: each of which has a batch of every step.
        memory_margin: share of the memory that is left free.
        inference: whether forward passes alone were measured.
    """
    largest, fastest = max(found.fitting), found.fastest
    peak, total = found.fitting[largest].peak_memory_bytes, found.fitting[largest].total_memory_bytes
    memory = "" if peak is None or total is None else f": {mib(peak)} of {mib(total)}, {memory_margin:.0%} left free"
    lines = [f"largest that fits  {largest:,} tokens{memory}"]
    if largest == found.largest:
        lines.append("                   no batch could be larger: it is a worker's part of all training sequences")
    elif found.larger_left:
        lines.append("                   more may fit: the time was over (raise --seconds)")
    if found.own > found.largest:
        lines.append(
            f"not measured       {found.own:,} tokens, the experiment's own budget: "
            f"batches would not fill it, as a worker's part of all training sequences is {found.largest:,}"
        )
    if len(found.fitting) > 1:
        lines.append(f"fastest            {fastest:,} tokens: {found.fitting[fastest].tokens_per_s:,.0f} tokens/s")
    elif found.ran_out_of_time:
        reason = "the time was over after one budget that fits (raise --seconds)"
        return [*lines, f"fastest            not known: {reason}"]
    else:
        lines.append("fastest            not known: no other budget was measured that fits")
    return lines + _to_set(found, global_tokens, workers, inference)


def _to_set(found: Found, global_tokens: int, workers: int, inference: bool) -> list[str]:
    if inference:
        return [f"set                --batch-tokens {found.fastest} where a tool or pipeline predicts"]
    at_once = found.fastest * workers
    steps = max(1, round(global_tokens / at_once))
    lines = [f"set                --batch.tokens {found.fastest} --batch.global_tokens {steps * at_once}"]
    if steps * at_once != global_tokens:
        dividing = [tokens for tokens in found.fitting if global_tokens % (tokens * workers) == 0]
        best = max(dividing, key=lambda tokens: found.fitting[tokens].tokens_per_s or 0.0, default=None)
        keeps = f"--batch.tokens {best} keeps" if best else "a budget that divides it would keep"
        lines.append(f"                   {keeps} batch.global_tokens {global_tokens}, on which results depend")
    return lines


def nothing_fits(found: Found) -> str:
    """Return why no budget fits, and what to change."""
    first, measurement = min(found.budgets.results.items())
    if found.ran_out_of_time:
        return (
            f"batch.tokens {first}: does not fit, and the time was over before a smaller budget was measured: "
            "raise --seconds"
        )
    if measurement.status not in ("ok", "out_of_memory"):
        return f"batch.tokens {first}: no budget could be measured ({measurement.reason})"
    return (
        f"batch.tokens {first}, which holds one sequence of data.max_length, does not fit: lower data.max_length, set "
        "model.backbone.gradient_checkpointing true, or take a smaller model"
    )
