"""The largest token budget that fits into memory, found by doubling and bisecting.

In: something that measures a budget. Out: what was tried. The experiment's own budget comes first, so that however
little time there is, what is there today has been measured; larger ones follow, then smaller ones. Memory grows about
in proportion to the budget, so that two measurements tell where to look: a budget far beyond the memory is not tried,
and the place to bisect at is the one where the memory is expected to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tuning.settings import Measurement

UNIT = 256
"""Tokens that budgets are multiples of."""

RESOLUTION = 8
"""The answer is within one part in so many of the largest budget that fits."""


@dataclass(frozen=True)
class Tried:
    """A budget and what became of it; ``measurement`` is None where the memory expected is said instead."""

    tokens: int
    fits: bool
    measurement: Measurement | None
    expected_bytes: float | None = None


class BudgetSearch:
    """Doubling, then bisecting.

    Args:
        measure: measures a budget.
        smallest: budget that the longest sequence fits into.
        largest: budget beyond which batches would not be filled.
        own: the experiment's budget, from which to start; None, or one that batches would not fill: the smallest.
        memory_margin: share of the memory that has to stay free.
        deadline: by the clock; no budget but the first is tried that is expected to end later.
        clock: seconds.
    """

    def __init__(
        self,
        measure: Callable[[int], Measurement],
        *,
        smallest: int,
        largest: int,
        own: int | None = None,
        memory_margin: float,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure, self._margin = measure, memory_margin
        self._smallest = min(_up(smallest), own or _up(smallest))
        self._largest = max(self._smallest, _up(largest))
        self._own = own
        self._first = own if own and own <= self._largest else self._smallest
        self._clock, self._deadline = clock, deadline
        self._last_s = 0.0
        self._points: dict[int, int] = {}
        self.tried: list[Tried] = []
        self.ran_out_of_time = False
        """Whether budgets were left for want of time."""
        self.larger_left = False
        """Whether larger ones than the largest that fits were."""

    @property
    def filled(self) -> bool:
        """Whether the largest budget that batches fill fits."""
        return any(tried.fits and tried.tokens == self._largest for tried in self.tried)

    @property
    def unfilled(self) -> int | None:
        """The experiment's own budget where batches would not fill it, so that it is not tried."""
        return self._own if self._own and self._own > self._largest else None

    @property
    def largest(self) -> int:
        """The largest budget that batches fill."""
        return self._largest

    def run(self) -> list[Tried]:
        """Search; the budgets from the smallest on."""
        if self._try(self._first):
            self._bisect(*self._double(self._first, self._upwards()))
            self._try_smaller()
        else:
            fits, too_large = self._double(0, [*self._downwards()][::-1])
            self._bisect(fits, too_large or self._first)
        self.tried.sort(key=lambda tried: tried.tokens)
        return self.tried

    def _double(self, fits: int, budgets: Iterable[int]) -> tuple[int, int]:
        """The largest that fits, ``fits`` or one of ``budgets``, and one that does not, 0 where there is none."""
        for tokens in budgets:
            expected = self._expected_bytes(tokens)
            if expected is not None and expected > self._total_bytes():
                self.tried.append(Tried(tokens, False, None, expected))
                return fits, tokens
            if self._too_late(2 * self._last_s):
                self.larger_left = True
                return fits, 0
            if not self._try(tokens):
                return fits, tokens
            fits = tokens
        return fits, 0

    def _upwards(self) -> Iterator[int]:
        """Doubled from the first on."""
        tokens = self._first
        while tokens < self._largest:
            tokens = min(_up(2 * tokens), self._largest)
            yield tokens

    def _downwards(self) -> Iterator[int]:
        """Halved from the first on, down to the smallest."""
        tokens = self._first
        while tokens > self._smallest:
            tokens = max(tokens // 2 // UNIT * UNIT, self._smallest)
            yield tokens

    def _try_smaller(self) -> None:
        """Smaller ones than the first fit as well and may be faster: as many as there is time for."""
        known = {tried.tokens for tried in self.tried}
        for tokens in self._downwards():
            if tokens not in known and (self._too_late(self._last_s) or not self._try(tokens)):
                return

    def _bisect(self, fits: int, too_large: int) -> None:
        while fits and too_large - fits > max(UNIT, fits // RESOLUTION):
            tokens = self._between(fits, too_large)
            if self._too_late(self._last_s):
                self.larger_left = True
                return
            if self._try(tokens):
                fits = tokens
            else:
                too_large = tokens

    def _between(self, fits: int, too_large: int) -> int:
        """Where the memory is expected to end, else the middle; at least a quarter of the way from both."""
        gap = too_large - fits
        guess = self._expected_end() or fits + gap / 2
        guess = min(max(guess, fits + gap / 4), too_large - gap / 4)
        return min(max(int(guess) // UNIT * UNIT, fits + UNIT), too_large - 1)

    def _try(self, tokens: int) -> bool:
        began = self._clock()
        measurement = self._measure(tokens)
        # The first trial loads what the others find loaded: its time says nothing of theirs.
        self._last_s = self._clock() - began if self.tried else 0.0
        peak, total = measurement.peak_memory_bytes, measurement.total_memory_bytes
        fits = measurement.status == "ok" and (peak is None or total is None or peak <= (1 - self._margin) * total)
        if measurement.status == "ok" and peak is not None:
            self._points[tokens] = peak
        self.tried.append(Tried(tokens, fits, measurement))
        return fits

    def _too_late(self, expected_s: float) -> bool:
        late = self._clock() + expected_s > self._deadline
        self.ran_out_of_time = self.ran_out_of_time or late
        return late

    def _total_bytes(self) -> float:
        totals = [t.measurement.total_memory_bytes for t in self.tried if t.measurement]
        return min((total for total in totals if total is not None), default=float("inf"))

    def _line(self) -> tuple[float, float] | None:
        """Bytes a token and bytes without any, from the two largest budgets that were measured."""
        if len(self._points) < 2:
            return None
        (low, low_bytes), (high, high_bytes) = sorted(self._points.items())[-2:]
        slope = (high_bytes - low_bytes) / (high - low)
        return (slope, high_bytes - slope * high) if slope > 0 else None

    def _expected_bytes(self, tokens: int) -> float | None:
        line = self._line()
        return None if line is None else line[0] * tokens + line[1]

    def _expected_end(self) -> float | None:
        line = self._line()
        return None if line is None else ((1 - self._margin) * self._total_bytes() - line[1]) / line[0]


def largest_fitting(tried: list[Tried]) -> Tried | None:
    """The largest budget that fits."""
    return max((t for t in tried if t.fits), key=lambda t: t.tokens, default=None)


def fastest_fitting(tried: list[Tried]) -> Tried | None:
    """The fastest budget that fits."""
    return max((t for t in tried if t.fits), key=_speed, default=None)


def _speed(tried: Tried) -> float:
    return (tried.measurement.tokens_per_s or 0.0) if tried.measurement else 0.0


def _up(tokens: int) -> int:
    return -(-tokens // UNIT) * UNIT
