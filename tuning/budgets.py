"""The largest token budget that fits into memory: by doubling, then between the last two.

Memory grows about in proportion to the budget, so two measurements predict it: a budget expected to need more than all
memory is not measured, as on a CPU it could take the memory of other programs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tuning.settings import Measurement

UNIT = 256
"""Tokens that budgets are multiples of."""


class BudgetSearch:
    """Ask for one of the ascending budgets, add what it came to to ``results``; begins with ``first``."""

    def __init__(self, budgets: Sequence[int], first: int, memory_margin: float) -> None:
        self._budgets, self._first, self._margin = list(budgets), first, memory_margin
        self.results: dict[int, Measurement] = {}
        self.expected_bytes: dict[int, float] = {}
        """Expected peaks of budgets that were not measured, as they would be out of memory."""

    def ask(self) -> int | None:
        """Return the next budget; None once the largest that fits is known."""
        while (tokens := self._next()) is not None:
            if (expected := self._expected(tokens)) <= self._total():
                return tokens
            self.expected_bytes[tokens] = expected
        return None

    def fits(self, tokens: int) -> bool:
        """Test that a budget was measured and left the margin free."""
        return tokens in self.results and self.results[tokens].fits(self._margin)

    def _next(self) -> int | None:
        known = sorted(self.results.keys() | self.expected_bytes)
        if not known:
            return self._first
        fitting = max(filter(self.fits, known), default=0)
        too_large = min((tokens for tokens in known if tokens > fitting), default=math.inf)
        between = [tokens for tokens in self._budgets if fitting < tokens < too_large]
        if not between:
            return None
        if not fitting:
            return next((tokens for tokens in between if 2 * tokens >= too_large), between[-1])
        if too_large == math.inf:
            return max((tokens for tokens in between if tokens <= 2 * fitting), default=between[0])
        return between[(len(between) - 1) // 2]

    def _expected(self, tokens: int) -> float:
        """Bytes, by the line through the two largest budgets that were measured to the end; 0 where not known."""
        peaks = {t: m.peak_memory_bytes for t, m in self.results.items() if m.status == "ok" and m.peak_memory_bytes}
        if len(peaks) < 2:
            return 0.0
        (low, low_bytes), (high, high_bytes) = sorted(peaks.items())[-2:]
        return high_bytes + max(0.0, high_bytes - low_bytes) / (high - low) * (tokens - high)

    def _total(self) -> float:
        totals = [m.total_memory_bytes for m in self.results.values() if m.total_memory_bytes is not None]
        return min(totals, default=math.inf)


@dataclass
class Found:
    """Budgets that were measured.

    Attributes:
        largest: the largest budget that batches fill.
        own: the experiment's budget.
        ran_out_of_time: budgets were left for want of time.
        larger_left: among them some above the largest that fits.
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
        deadline: no budget but the first is begun that is expected to end later by ``clock``, in seconds.
    """
    smallest = min(_up(smallest), own)
    largest = max(smallest, _up(largest))
    first = own if own <= largest else smallest
    budgets = BudgetSearch(_ladder(smallest, largest, first), first, memory_margin)
    found = Found(budgets, largest, own)
    seconds_a_token = 0.0
    for tokens in _proposals(budgets, first, smallest):
        began, is_first = clock(), not budgets.results
        if not is_first and began + tokens * seconds_a_token > deadline:
            found.ran_out_of_time, found.larger_left = True, budgets.ask() is not None
            break
        budgets.results[tokens] = measure(tokens)
        seconds_a_token = 0.0 if is_first else (clock() - began) / tokens  # the first loads what the others find loaded
    return found


def _proposals(budgets: BudgetSearch, first: int, smallest: int) -> Iterator[int]:
    while (tokens := budgets.ask()) is not None:
        yield tokens
    tokens = first
    while budgets.fits(tokens) and tokens > smallest:
        tokens = max(tokens // 2 // UNIT * UNIT, smallest)
        if tokens not in budgets.results:
            yield tokens


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
