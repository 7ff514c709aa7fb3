"""The number of steps of a run, and the values that depend on the step: learning rate and momentum.

All are pure functions of the step, the number of steps and the settings. A resumed run therefore has the same values as
an uninterrupted one.
"""

import math
from typing import NamedTuple

from esmeray.dataset.batches.steps import TrainingSteps
from esmeray.training.engine.muon import PEAK_MOMENTUM
from esmeray.training.section import TrainingSection

FIRST_MOMENTUM, MOMENTUM_STEPS = 0.85, 300
"""Muon's momentum at the first step, and the steps until it is constant, as in Jordan's own runs."""


class Course(NamedTuple):
    """Number of steps of a run, and the step until which wsd can be prolonged; None for other schedules."""

    total_steps: int
    branch_step: int | None


def course_of(training: TrainingSection, batches: TrainingSteps) -> Course:
    """Return the steps of a run with these settings and batches."""
    total_steps = training.max_steps or batches.total_steps(training.epochs)
    # Only wsd has steps that do not depend on the end: a cosine decays from its first step after the warm-up.
    return Course(total_steps, steps_before_decay(total_steps, training) if training.schedule == "wsd" else None)


def learning_rate(step: int, total_steps: int, training: TrainingSection) -> float:
    """Return the learning rate of a step (from 0): linear warm-up, a stable part, then decay to a floor.

    The cosine follows Loshchilov & Hutter 2017, eq. 5, without restarts; wsd follows Hu et al. 2024 (MiniCPM), section
    4, with a linear decay.
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
    """Return the number of steps before the decay; their learning rates do not depend on the end of training."""
    if training.schedule == "constant":
        return total_steps
    decay_steps = round(training.decay_share * total_steps) if training.schedule == "wsd" else total_steps
    return max(_warmup_steps(total_steps, training), total_steps - decay_steps)


def muon_momentum(step: int) -> float:
    """Return Muon's momentum at a step (from 0): a linear rise, then constant."""
    rise = (PEAK_MOMENTUM - FIRST_MOMENTUM) * step / MOMENTUM_STEPS
    return FIRST_MOMENTUM + rise if step < MOMENTUM_STEPS else PEAK_MOMENTUM


def _warmup_steps(total_steps: int, training: TrainingSection) -> int:
    return total_steps // 10 if training.warmup_steps is None else training.warmup_steps
