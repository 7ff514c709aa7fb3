"""The largest token budget that fits into memory: by doubling, then between the last two.

In: budgets, and what measuring each of them gave. Out: the budget to measure next. Memory grows about in proportion to
the budget, so two measurements predict it: a budget expected to need more than all memory is not measured, as on a CPU
it could take the memory of other programs. :func:`search_budgets` is a search over budgets alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuning.settings import Measurement

UNIT = 256
"""Tokens that budgets are multiples of."""


class BudgetSearch:
    """Ask for a budget, measure it, tell the result.

    Args:
        budgets: ascending.
        first: the one to start from.
        memory_margin: share of the memory that has to stay free.
    """

    def __init__(self, budgets: Sequence[int], first: int, memory_margin: float) -> None:
        self._budgets, self._first, self._margin = list(budgets), first, memory_margin
        self.results: dict[int, Measurement] = {}
        self.expected_bytes: dict[int, float] = {}
        """Of budgets that were not measured, as they would be out of memory."""

    def ask(self) -> int | None:
        """Return the next budget; None once the largest that fits is known."""
        while (tokens := self._next()) is not None:
            expected = self._expected(tokens)
            if expected is None or expected <= self._total():
                return tokens
            self.expected_bytes[tokens] = expected
        return None

    def tell(self, tokens: int, measurement: Measurement) -> None:
        """Add a result."""
        self.results[tokens] = measurement

    def fits(self, tokens: int) -> bool:
        """Return whether a budget was measured and left the margin free."""
        return tokens in self.results and self.results[tokens].fits(self._margin)

    def _next(self) -> int | None:
        budgets = self._budgets
        fitting = [place for place, tokens in enumerate(budgets) if self.fits(tokens)]
        known = self.results.keys() | self.expected_bytes
        too_large = [place for place, tokens in enumerate(budgets) if tokens in known and not self.fits(tokens)]
        if not known:
            return self._first
        if not fitting:
            halves = [tokens for tokens in budgets[: too_large[0]] if 2 * tokens >= budgets[too_large[0]]]
            return next(iter([*halves, *budgets[: too_large[0]][-1:]]), None)
        low, high = fitting[-1], next((place for place in too_large if place > fitting[-1]), len(budgets))
        if high - low <= 1:
            return None
        if high == len(budgets):
            doubled = [tokens for tokens in budgets if tokens <= 2 * budgets[low]]
            return max(doubled[-1], budgets[low + 1])
        return budgets[self._between(low, high)]

    def _between(self, low: int, high: int) -> int:
        """Where the memory is expected to end, at least a quarter of the way from both; else the middle."""
        line, quarter = self._line(), (high - low) / 4
        if line is None:
            return (low + high) // 2
        end = ((1 - self._margin) * self._total() - line[1]) / line[0]
        place = sum(tokens <= end for tokens in self._budgets) - 1
        return max(low + 1, min(high - 1, round(min(max(place, low + quarter), high - quarter))))

    def _expected(self, tokens: int) -> float | None:
        line = self._line()
        return None if line is None else line[0] * tokens + line[1]

    def _line(self) -> tuple[float, float] | None:
        """Bytes a token and bytes without any, from the two largest budgets that were measured to the end."""
        peaks = {t: m.peak_memory_bytes for t, m in self.results.items() if m.status == "ok" and m.peak_memory_bytes}
        if len(peaks) < 2:
            return None
        (low, low_bytes), (high, high_bytes) = sorted(peaks.items())[-2:]
        slope = (high_bytes - low_bytes) / (high - low)
        return (slope, high_bytes - slope * high) if slope > 0 else None

    def _total(self) -> float:
        totals = [m.total_memory_bytes for m in self.results.values() if m.total_memory_bytes is not None]
        return min(totals, default=float("inf"))


@dataclass
class Found:
    """Budgets that were measured.

    Attributes:
        budgets: the search and its results.
        largest: the largest budget that batches fill.
        own: the experiment's budget.
        ran_out_of_time: budgets were left for want of time.
        larger_left: larger ones than the largest that fits were.
    """

    budgets: BudgetSearch
    largest: int
    own: int
    ran_out_of_time: bool = False
    larger_left: bool = False

    @property
    def fitting(self) -> dict[int, Measurement]:
        """Measurements of the budgets that fit, ascending."""
        return {tokens: m for tokens, m in sorted(self.budgets.results.items()) if self.budgets.fits(tokens)}

    @property
    def fastest(self) -> int:
        """The fastest budget that fits."""
        return max(self.fitting, key=lambda tokens: self.fitting[tokens].tokens_per_s or 0.0)


def search_budgets(
    measure: Callable[[int], Measurement],
    *,
    smallest: int,
    largest: int,
    own: int,
    memory_margin: float,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Measure budgets: the experiment's own, larger ones up to the largest that fits, then smaller ones.

    Args:
        measure: measures a budget.
        smallest: budget that holds the longest sequence.
        largest: budget beyond which batches would not be filled.
        own: the experiment's budget; the smallest is the first where batches would not fill it.
        memory_margin: share of the memory that has to stay free.
        deadline: by the clock; no budget but the first is begun that is expected to end later.
        clock: seconds.
    """
    smallest = min(_up(smallest), own)
    largest = max(smallest, _up(largest))
    first = own if own <= largest else smallest
    budgets = BudgetSearch(_ladder(smallest, largest, first), first, memory_margin)
    found = Found(budgets, largest, own)
    seconds_a_token = 0.0

    def measured(tokens: int) -> bool:
        """Return whether there was time."""
        nonlocal seconds_a_token
        began = clock()
        if budgets.results and began + tokens * seconds_a_token > deadline:
            found.ran_out_of_time = True
            return False
        is_first = not budgets.results  # it loads what the others find loaded
        budgets.tell(tokens, measure(tokens))
        seconds_a_token = 0.0 if is_first else (clock() - began) / tokens
        return True

    while (tokens := budgets.ask()) is not None:
        if not measured(tokens):
            found.larger_left = True
            return found
    smaller = first
    while budgets.fits(smaller) and smaller > smallest:
        smaller = max(smaller // 2 // UNIT * UNIT, smallest)
        if smaller not in budgets.results and not measured(smaller):
            break
    return found


def _ladder(smallest: int, largest: int, first: int) -> list[int]:
    """Budgets at most an eighth apart, multiples of the unit; among them the first, doubled and doubled again."""
    budgets = {smallest, first, largest}
    doubled = first
    while (doubled := _up(2 * doubled)) < largest:
        budgets.add(doubled)
    tokens = smallest
    while (tokens := max(_up(tokens + 1), tokens * 9 // 8 // UNIT * UNIT)) < largest:
        budgets.add(tokens)
    return sorted(budgets)


def _up(tokens: int) -> int:
    return -(-tokens // UNIT) * UNIT
