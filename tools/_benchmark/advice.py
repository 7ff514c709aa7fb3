"""What to change, from what was measured: one line each, with the key to set.

In: the stages. Out: advice, each line with the ratio it rests on. Ratios are taken within each round; beside their
median stands its 95 % interval from their order alone (David and Nagaraja 2003, Order Statistics, section 7.1), which
is the smallest to the largest where rounds are fewer than nine. A line advises a change only where the whole
interval says so, and by more than 2 %; otherwise it says that nothing is gained.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import NamedTuple

from tools._benchmark.measuring import LEAST_ROUNDS, Row, StageResult
from tools._benchmark.report import quantity
from train_config.schema import BatchSection, DataSection

TOKENS = "tokens/s"
WAITING = "% waiting for data"
FILLED = "% filled"

WORTH = 1.02
"""Gains below this are not worth a line in a config."""

_TAIL = 0.025
NO_WAIT_PERCENT = 1.0
WELL_FILLED_PERCENT = 98.0
AMP_NAMES = {"bf16": "bf16", "fp32": "none"}
"""Precisions as training.amp_dtype calls them."""


class Ratio(NamedTuple):
    """Of the rounds: their median and its interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} times ({self.low:.2f} to {self.high:.2f})"


def ratio(row: Row, other: Row, unit: str = TOKENS) -> Ratio | None:
    """How many times more of the unit the first gives, or None where the rounds are too few to say."""
    ratios = [a / b for a, b in zip(row.samples[unit], other.samples[unit], strict=False) if b > 0]
    if len(ratios) < LEAST_ROUNDS:
        return None
    return Ratio(median(ratios), *median_interval(ratios))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """An interval that holds the median with a probability of 95 %, whatever the distribution.

    Between the k-th smallest and the k-th largest, where fewer than k of n fall below the median with a chance of at
    most 2.5 %. With fewer than six values no interval is as sure, and it is the smallest to the largest.
    """
    ordered, number = sorted(values), len(values)
    place, below = 0, 0.5**number
    while below + comb(number, place + 1) * 0.5**number <= _TAIL:
        place += 1
        below += comb(number, place) * 0.5**number
    return ordered[place], ordered[-1 - place]


def best_inference(inference: StageResult) -> Row:
    """The budget and precision of the most tokens/s."""
    return max(inference.rows, key=lambda row: row.median(TOKENS))


def reference_budget(rows: Sequence[Row]) -> int:
    """The default of batch.tokens, or what was measured nearest to it."""
    default = BatchSection().tokens
    return min((int(row.settings["batch.tokens"]) for row in rows), key=lambda budget: abs(budget - default))


def advise(stages: dict[str, StageResult]) -> list[str]:
    """The lines, what gains most first; of stages that were measured.

    Args:
        stages: by name.
    """
    lines: list[tuple[float, str]] = []
    if "inference" in stages and stages["inference"].rows:
        rows = stages["inference"].rows
        best = best_inference(stages["inference"])
        lines += [_precision(rows, best), _budget(rows, best)]
        if "packing" in stages:
            lines += _packing(stages["packing"].rows, int(best.settings["batch.tokens"]))
    if "pipeline" in stages:
        lines += _workers(stages["pipeline"].rows)
    return [line for _, line in sorted(lines, key=lambda gain_and_line: -gain_and_line[0])]


def slowest(stages: dict[str, StageResult], tokens_per_record: float) -> list[str]:
    """Which stage bounds the pipeline, in tokens/s of each at its best."""
    rates = {}
    for name, unit, factor in (
        ("reading", "records/s", tokens_per_record),
        ("packing", "records/s", tokens_per_record),
        ("tokenizing", TOKENS, 1.0),
        ("loading", TOKENS, 1.0),
        ("inference", TOKENS, 1.0),
    ):
        rows = stages[name].rows if name in stages else []
        if rows:
            rates[name] = factor * max(row.median(unit) for row in rows)
    if len(rates) < 2:
        return []
    first, second = sorted(rates, key=rates.__getitem__)[:2]
    return [
        f"{first} is the slowest stage, with {rates[first]:,.0f} tokens/s; the next, {second}, does "
        f"{rates[second]:,.0f}, which is {quantity(rates[second] / rates[first])} times as many"
    ]


def _precision(rows: Sequence[Row], best: Row) -> tuple[float, str]:
    budget = best.settings["batch.tokens"]
    same = {row.settings["precision"]: row for row in rows if row.settings["batch.tokens"] == budget}
    if set(same) != {"fp32", "bf16"}:
        return 0.0, "training.amp_dtype: only one precision could be measured"
    found = ratio(same["bf16"], same["fp32"])
    if found is None:
        return 0.0, "training.amp_dtype: too few rounds to say; --seconds gives more"
    if found.low > WORTH:
        return found.median, f"training.amp_dtype {AMP_NAMES['bf16']}: the forward does {found} the tokens/s of fp32"
    if found.high < 1 / WORTH:
        line = f"training.amp_dtype {AMP_NAMES['fp32']}: in bf16 the forward does only {found} the tokens/s of fp32"
        return 1 / found.median, line
    return 0.0, f"training.amp_dtype: bf16 does {found} the tokens/s of fp32, no difference beyond the spread"


def _budget(rows: Sequence[Row], best: Row) -> tuple[float, str]:
    precision = best.settings["precision"]
    same = {int(row.settings["batch.tokens"]): row for row in rows if row.settings["precision"] == precision}
    default = reference_budget(list(same.values()))
    chosen = int(best.settings["batch.tokens"])
    found = ratio(best, same[default])
    if chosen != default and found is not None and found.low > WORTH:
        return found.median, (
            f"batch.tokens {default} -> {chosen}: the forward does {found} the tokens/s ({precision}); "
            f"batch.global_tokens stays as it is"
        )
    return 0.0, f"batch.tokens {default}: no other budget that was measured is faster beyond the spread; leave it"


def _packing(rows: Sequence[Row], budget: int) -> list[tuple[float, str]]:
    filled = {
        int(row.settings["batch.packing_window"]): row.median(FILLED)
        for row in rows
        if row.settings["batch.tokens"] == budget
    }
    default = BatchSection().packing_window
    if default not in filled or filled[default] >= WELL_FILLED_PERCENT:
        return []
    window = max(filled, key=lambda size: filled[size])
    gain = filled[window] / filled[default]
    if gain <= 1.005:
        return []
    return [
        (
            gain,
            f"batch.packing_window {default} -> {window}: batches of {budget} tokens are {filled[window]:.1f} % full "
            f"in place of {filled[default]:.1f} %",
        )
    ]


def _workers(rows: Sequence[Row]) -> list[tuple[float, str]]:
    by_number = {int(row.settings["data.num_workers"]): row for row in rows if row.rounds >= LEAST_ROUNDS}
    default = DataSection().num_workers
    if default not in by_number:
        return [(0.0, "data.num_workers: too few rounds to say; --seconds gives more")] if rows else []
    now, none = by_number[default], by_number.get(0)
    fastest = max(by_number.values(), key=lambda row: row.median(TOKENS))
    number, found = int(fastest.settings["data.num_workers"]), ratio(fastest, now)
    key = f"data.num_workers {default}"
    waits = f"the model waits {fastest.median(WAITING):.1f} %"
    if number != default and found is not None and found.low > WORTH:
        line = f"{key} -> {number}: the pipeline does {found} the tokens/s; {waits}, not {now.median(WAITING):.1f} %"
        return [(found.median, line)]
    if none is not None and (most := median_interval(none.samples[WAITING])[1]) < NO_WAIT_PERCENT:
        share = f"{none.median(WAITING):.2f} % of the time (at most {most:.2f} %)"
        line = f"{key} -> 0: without a loader process the model waits {share}, so there is nothing for one to gain"
        return [(0.0, line)]
    return [(0.0, f"{key}: {waits} with the best number, and none is faster beyond the spread; leave it")]
