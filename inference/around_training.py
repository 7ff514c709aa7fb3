"""What a run of a task has made by inference, before it is trained and after it, by the task's name."""

from pkgutil import resolve_name

from train_config.schema import Config

BEFORE = {"terms": "inference.function.vectors:with_vectors"}
"""From the sections run, data and the task's own to the last as training reads it."""
AFTER = {"terms": "inference.function.blend:finish"}
"""Takes these sections of a finished run."""


def before_training(config: Config) -> Config:
    """Make what training needs, and return the config that names it."""
    work = BEFORE.get(config.model.task)
    if work is None:
        return config
    section = resolve_name(work)(config.run, config.data, getattr(config.model, config.model.task))
    return config.model_copy(update={"model": config.model.model_copy(update={config.model.task: section})})


def after_training(config: Config) -> None:
    """Make what belongs to a finished run."""
    work = AFTER.get(config.model.task)
    if work is not None:
        resolve_name(work)(config.run, config.data, getattr(config.model, config.model.task))
