"""What a run of a task has made by inference, before it is trained and after it, by the task's name."""

from __future__ import annotations

from pkgutil import resolve_name

from train_config.schema import Config

BEFORE = {"terms": "inference.function.vectors:with_vectors"}
"""From a config to the one to train with."""
AFTER = {"terms": "inference.function.blend:finish"}
"""Of the config of a finished run."""


def before_training(config: Config) -> Config:
    """Make what training needs, and return the config that names it."""
    work = BEFORE.get(config.model.task)
    return config if work is None else resolve_name(work)(config)


def after_training(config: Config) -> None:
    """Make what belongs to a finished run."""
    work = AFTER.get(config.model.task)
    if work is not None:
        resolve_name(work)(config)
