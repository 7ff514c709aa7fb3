"""Medians, spreads and ratios of what was measured.

A ratio is taken round by round, since contenders of one round met the same noise; the result is the median of these
ratios, its interval their smallest and largest. With as few rounds as a benchmark can afford, that is the honest
interval: no distribution is assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

Verdict = Literal["reached", "reached, within noise", "missed, within noise", "missed", "no floor"]


class Spread(NamedTuple):
    """Median and quartiles (linear interpolation)."""

    median: float
    lower: float
    upper: float


class Ratio(NamedTuple):
    """Median of the ratios of each round, with the smallest and the largest."""

    median: float
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


def ratio_of(ratios: Sequence[float]) -> Ratio:
    """Median and interval of the ratios of the rounds."""
    return Ratio(median(ratios), min(ratios), max(ratios))


def verdict(ratio: Ratio, floor: float | None) -> Verdict:
    """Whether the floor was reached, and whether every round says so."""
    if floor is None:
        return "no floor"
    if ratio.median >= floor:
        return "reached" if ratio.low >= floor else "reached, within noise"
    return "missed" if ratio.high < floor else "missed, within noise"
