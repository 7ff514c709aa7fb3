"""The line that a task's package is to the registry: where its parts are, each as ``module:name``.

A part is imported when it is first used: the driver must not wait for torch, nor a reader of settings for either.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, NamedTuple


class Task(NamedTuple):
    """The parts of a task.

    Attributes:
        section: its settings, which stand in the schema as ``model.NAME``.
        plan: the :class:`~training.tasks.plan.TaskPlan`, for the driver.
        experiment: the :class:`~training.tasks.experiment.Experiment`, for the workers.
        open: a function of the folder of an export, which returns the model in fp32 on the CPU, in evaluation mode, and
            its tokenizer. Raises DataError where the folder holds another model or is damaged.
    """

    section: str
    plan: str
    experiment: str
    open: str

    def load(self, part: str) -> Any:
        """Import one of the parts."""
        return resolve_name(getattr(self, part))
