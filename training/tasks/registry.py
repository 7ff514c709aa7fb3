"""The tasks by name: the one place that knows them. A new task is a package beside this file and its name here."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from run_folder.metrics_log import MetricLabels
from train_config.schema import Config, DataSection
from training.tasks.plan import TaskPlan
from training.tasks.task import Task

if TYPE_CHECKING:
    from training.tasks.experiment import Experiment


TASKS = ("autoencoder", "masked_lm", "diffusion", "classifier", "terms")
"""Names of ``model.task`` and of the packages, each of which has a ``TASK``."""


def task_named(name: str) -> Task:
    return resolve_name(f"{__package__}.{name}:TASK")


def task_plan(config: Config) -> TaskPlan:
    """Return the driver's side of the config's task."""
    return task_named(config.model.task).load("plan")(config)


def experiment_class(task: str) -> type[Experiment]:
    """Return the workers' side of a task."""
    return task_named(task).load("experiment")


def metric_labels() -> MetricLabels:
    """Return the words for the metrics of all tasks, by the metric's name."""
    return {name: label for task in TASKS for name, label in task_named(task).metrics.items()}


def stage(task: str, data: DataSection, path: Path) -> Path:
    """Return where this node has the prepared data; copied and verified once in a process where it is to be staged."""
    if data.stage_dir is None:
        return path
    return experiment_class(task).stage(path, Path(data.stage_dir))
