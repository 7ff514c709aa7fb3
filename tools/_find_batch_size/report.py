"""What was found, for a person: a table of budgets, and which keys to set."""

from __future__ import annotations

from rich.table import Table

from tools._find_batch_size.budgets import BudgetSearch, Tried, fastest_fitting, largest_fitting
from training.engine.memory_meter import mib


def table(tried: list[Tried]) -> Table:
    """A row a budget."""
    columns = Table(box=None, pad_edge=False)
    for name in ("batch.tokens", "tokens/s", "peak memory", "fits"):
        columns.add_column(name, justify="right" if name != "fits" else "left")
    columns.add_column("")
    for row in tried:
        measurement = row.measurement
        if measurement is None:
            columns.add_row(f"{row.tokens:,}", "", f"~ {mib(row.expected_bytes or 0)}", "no", "not tried")
            continue
        speed, peak = measurement.tokens_per_s, measurement.peak_memory_bytes
        columns.add_row(
            f"{row.tokens:,}",
            "" if speed is None else f"{speed:,.0f}",
            "" if peak is None else mib(peak),
            "yes" if row.fits else "no",
            "" if measurement.status == "ok" else measurement.reason,
        )
    return columns


def advice(
    search: BudgetSearch, *, global_tokens: int, workers: int, memory_margin: float, inference: bool
) -> list[str]:
    """Lines that say which budget is the largest and which the fastest, and what to set.

    Args:
        search: that is done, and of whose budgets some fits.
        global_tokens: that the config has.
        workers: each of which is to have a batch of every step.
        memory_margin: share of the memory that is left free.
        inference: whether forward passes alone were measured.
    """
    largest, fastest = largest_fitting(search.tried), fastest_fitting(search.tried)
    assert largest is not None and largest.measurement is not None
    assert fastest is not None and fastest.measurement is not None
    peak, total = largest.measurement.peak_memory_bytes, largest.measurement.total_memory_bytes
    memory = "" if peak is None or total is None else f": {mib(peak)} of {mib(total)}, {memory_margin:.0%} left free"
    lines = [f"largest that fits  {largest.tokens:,} tokens{memory}"]
    if search.filled:
        lines.append("                   no batch could be larger: it is a worker's part of all training sequences")
    elif search.larger_left:
        lines.append("                   more may fit: the time was over (raise --seconds)")
    if search.unfilled:
        lines.append(
            f"not measured       {search.unfilled:,} tokens, the experiment's own budget: "
            f"batches would not fill it, as a worker's part of all training sequences is {search.largest:,}"
        )
    if sum(tried.fits for tried in search.tried) < 2:
        if search.ran_out_of_time:
            reason = "the time was over after one budget that fits (raise --seconds)"
            return [*lines, f"fastest            not known: {reason}"]
        lines.append("fastest            not known: no other budget was measured that fits")
    else:
        lines.append(f"fastest            {fastest.tokens:,} tokens: {fastest.measurement.tokens_per_s:,.0f} tokens/s")
    return lines + _to_set(search.tried, fastest, global_tokens, workers, inference)


def _to_set(tried: list[Tried], fastest: Tried, global_tokens: int, workers: int, inference: bool) -> list[str]:
    if inference:
        return [f"set                --batch-tokens {fastest.tokens} where a tool or pipeline predicts"]
    at_once = fastest.tokens * workers
    steps = max(1, round(global_tokens / at_once))
    lines = [f"set                --batch.tokens {fastest.tokens} --batch.global_tokens {steps * at_once}"]
    if steps * at_once != global_tokens:
        dividing = [t for t in tried if t.fits and global_tokens % (t.tokens * workers) == 0]
        best = fastest_fitting(dividing)
        keeps = f"--batch.tokens {best.tokens} keeps" if best else "a budget that divides it would keep"
        lines.append(f"                   {keeps} batch.global_tokens {global_tokens}, on which results depend")
    return lines
