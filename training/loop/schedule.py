"""The learning rate as a pure function of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math

from train_config.schema import TrainingSection


def learning_rate(step: int, total_steps: int, training: TrainingSection) -> float:
    """Linear warm-up, then cosine decay (Loshchilov & Hutter 2017, eq. 5, without restarts).

    Args:
        step: optimizer step from 0.
        total_steps: steps of the whole run.
        training: peak, floor share and warm-up steps.

    Returns:
        The rate that the update of this step uses.
    """
    warmup_steps = total_steps // 10 if training.warmup_steps is None else training.warmup_steps
    if step < warmup_steps:
        return training.learning_rate * (step + 1) / warmup_steps
    decay_steps = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    floor = training.min_learning_rate_share
    return training.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
