"""Medians, spreads and ratios of what was measured.

A ratio is taken round by round, since contenders of one round met the same noise; the result is the median of these
ratios, its interval their smallest and largest. With as few rounds as a benchmark can afford, that is the honest
interval: no distribution is assumed.

Many short rounds tell more: their geometric mean, in which also what costs much in a few of them counts, and the
interval that holds it with 95 % confidence, by bootstrap (Efron 1979, percentiles). Two successive rounds are taken
together first: contenders take turns (A B, B A), so that a drift of the machine cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from benchmarks.harness.stage import Estimate

_RESAMPLES = 10_000
_CONFIDENCE_PERCENT = (2.5, 97.5)

Verdict = Literal["reached", "reached, within noise", "missed, within noise", "missed", "no floor"]


class Spread(NamedTuple):
    """Median and quartiles (linear interpolation)."""

    median: float
    lower: float
    upper: float


class Ratio(NamedTuple):
    """Of ours to its peer, with an interval."""

    value: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one value."""
    lower, upper = np.percentile(values, [25, 75])
    return Spread(median(values), float(lower), float(upper))


def round_ratios(ours: Sequence[float], peer: Sequence[float], better: Literal["higher", "lower"]) -> list[float]:
    """One ratio for each round, larger where ours is better.

    Raises:
        ValueError: not measured equally often.
    """
    pairs = zip(ours, peer, strict=True)
    return [a / b if better == "higher" else b / a for a, b in pairs]


def ratio_of(ratios: Sequence[float], estimate: Estimate = "median") -> Ratio:
    """Median or geometric mean of the ratios of the rounds, and its interval."""
    if estimate == "median":
        return Ratio(median(ratios), min(ratios), max(ratios))
    logs = np.log(ratios)
    pairs = np.array([logs[first : first + 2].mean() for first in range(0, len(logs), 2)])
    drawn = np.random.default_rng(0).choice(pairs, size=(_RESAMPLES, len(pairs)))
    value, low, high = np.exp([pairs.mean(), *np.percentile(drawn.mean(axis=1), _CONFIDENCE_PERCENT)])
    return Ratio(float(value), float(low), float(high))


def verdict(ratio: Ratio, floor: float | None) -> Verdict:
    """Whether the floor was reached, and whether the whole interval says so."""
    if floor is None:
        return "no floor"
    if ratio.value >= floor:
        return "reached" if ratio.low >= floor else "reached, within noise"
    return "missed" if ratio.high < floor else "missed, within noise"
