"""The largest token budget that fits into memory: by doubling, then between the last two.

In: budgets, and what measuring each of them gave. Out: the budget to measure next. Memory grows about in proportion to
the budget, so two measurements predict it: a budget expected to need more than all memory is not measured, as on a CPU
it could take the memory of other programs.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuning.settings import Measurement


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
