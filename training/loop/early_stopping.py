"""Which evaluation was the best, and when more training no longer pays (Prechelt 1998)."""

from __future__ import annotations

import math
from collections.abc import Iterable


class EarlyStopping:
    """Follows the cost of evaluations, lower being better.

    Args:
        patience: evaluations without a lower cost after which it is over; None for any number.
        costs: of the evaluations so far, in order, when a run goes on.

    Attributes:
        is_best: whether the last evaluation was the best one.
    """

    def __init__(self, patience: int | None, costs: Iterable[float] = ()) -> None:
        self._patience = patience
        self._best = math.inf
        self._since_best = 0
        self.is_best = False
        for cost in costs:
            self.note(cost)

    def note(self, cost: float) -> None:
        """Take in an evaluation."""
        self.is_best = cost < self._best
        self._best = min(self._best, cost)
        self._since_best = 0 if self.is_best else self._since_best + 1

    @property
    def is_over(self) -> bool:
        """Whether the patience is used up."""
        return self._patience is not None and self._since_best >= self._patience
