"""The steps of a run, and the values that follow them: the learning rate, the momentum.

In: the number of a step, the steps of the run, the section of settings. Pure functions, so that a run that is resumed
has the values of one that never stopped.
"""

import math
from typing import NamedTuple

from esmeray.dataset.batches.steps import TrainingSteps
from esmeray.training.section import MuonSection, TrainingSection


class Course(NamedTuple):
    """The number of steps of a run, and after how many of them wsd can be prolonged; None for other schedules."""

    total_steps: int
    branch_step: int | None


def course_of(training: TrainingSection, batches: TrainingSteps) -> Course:
    """The steps of a run by these settings on these batches."""
    total_steps = training.max_steps or batches.total_steps(training.epochs)
    # Only wsd has a part that does not depend on the end: a cosine decays from its first step after the warm-up.
    return Course(total_steps, steps_before_decay(total_steps, training) if training.schedule == "wsd" else None)


def learning_rate(step: int, total_steps: int, training: TrainingSection) -> float:
    """The rate of the update of this step (from 0): linear warm-up, a stable part, then decay to a floor.

    The cosine is that of Loshchilov & Hutter 2017, eq. 5, without restarts; wsd that of Hu et al. 2024 (MiniCPM),
    section 4, with a linear decay.
    """
    warmup_steps = _warmup_steps(total_steps, training)
    if step < warmup_steps:
        return training.learning_rate * (step + 1) / warmup_steps
    stable_steps = steps_before_decay(total_steps, training)
    progress = min(1.0, max(0, step - stable_steps) / max(1, total_steps - stable_steps))
    height = 0.5 * (1 + math.cos(math.pi * progress)) if training.schedule == "cosine" else 1 - progress
    floor = training.min_learning_rate_share
    return training.learning_rate * (floor + (1 - floor) * height)


def steps_before_decay(total_steps: int, training: TrainingSection) -> int:
    """Steps whose learning rates do not depend on the end of training: none of them has decayed."""
    if training.schedule == "constant":
        return total_steps
    decay_steps = round(training.decay_share * total_steps) if training.schedule == "wsd" else total_steps
    return max(_warmup_steps(total_steps, training), total_steps - decay_steps)


def muon_momentum(step: int, muon: MuonSection) -> float:
    """Muon's momentum in the update of this step (from 0): a linear rise, then constant."""
    rise = (muon.momentum - muon.warmup_momentum) * step / max(1, muon.momentum_warmup_steps)
    return muon.warmup_momentum + rise if step < muon.momentum_warmup_steps else muon.momentum


def _warmup_steps(total_steps: int, training: TrainingSection) -> int:
    return total_steps // 10 if training.warmup_steps is None else training.warmup_steps
