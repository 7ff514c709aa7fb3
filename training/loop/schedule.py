"""The learning rate as a pure function of the step, so that resuming needs no scheduler state; early stopping."""

import math
from collections.abc import Iterable

from train_config.schema import TrainingSection


def learning_rate(step: int, total_steps: int, training: TrainingSection) -> float:
    """The rate of the update of this step (from 0): linear warm-up, then cosine decay to a floor.

    Loshchilov & Hutter 2017, eq. 5, without restarts.
    """
    warmup_steps = total_steps // 10 if training.warmup_steps is None else training.warmup_steps
    if step < warmup_steps:
        return training.learning_rate * (step + 1) / warmup_steps
    decay_steps = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    floor = training.min_learning_rate_share
    return training.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


class EarlyStopping:
    """The cost of evaluations, lower being better (Prechelt 1998); over after ``patience`` of them without a lower one.

    ``costs`` are those of the evaluations so far, in order. ``is_best``: the last evaluation was the best one.
    """

    def __init__(self, patience: int | None, costs: Iterable[float] = ()) -> None:
        self._patience = patience
        self._best = math.inf
        self._since_best = 0
        self.is_best = False
        for cost in costs:
            self.note(cost)

    def note(self, cost: float) -> None:
        self.is_best = cost < self._best
        self._best = min(self._best, cost)
        self._since_best = 0 if self.is_best else self._since_best + 1

    @property
    def is_over(self) -> bool:
        return self._patience is not None and self._since_best >= self._patience
