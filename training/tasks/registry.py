"""The tasks by name: the one place that knows them. A new task is a package beside this file and its name here, or
another package's entry point.

A part of a task is imported when it is first used: the driver must not wait for torch.
"""

from pkgutil import resolve_name
from typing import Any, NamedTuple

from esmeray.installation import added
from esmeray.run_folder.metrics_log import MetricLabel, MetricLabels
from esmeray.train_config.schema import Config
from esmeray.training.tasks.plan import TaskPlan

TASKS = ("autoencoder", "masked_lm", "diffusion", "classifier", "terms")
"""Names of ``model.task`` and of the packages, each of which has a ``TASK``."""

RESIDUE_RECOVERY = MetricLabel(
    "recovery, share of residues right", "recovery", "share of the residues that are predicted right"
)
"""The label of ``residue_recovery``, which every task on residues has."""


class Task(NamedTuple):
    """The parts of a task, each as ``module:name``.

    How its exports are opened stands in :mod:`esmeray.model.export.opening`, which needs no training.

    Attributes:
        plan: the :class:`~esmeray.training.tasks.plan.TaskPlan`, for the driver.
        experiment: the :class:`~esmeray.training.tasks.experiment.Experiment`, for the workers.
        metrics: words for those of its metrics that are shown while it trains.
        before, after: what is made by inference before a run is trained and after it; both take the sections run, data
            and the task's own, and the first returns the last of these as training reads it.
        next: commands that use a finished run, of which ``{run}`` is the folder or URI, ``{name}`` the name, and
            ``{input}`` are the sequences that it was trained on.
    """

    plan: str
    experiment: str
    metrics: MetricLabels
    before: str | None = None
    after: str | None = None
    next: tuple[str, ...] = ()


def task_named(name: str) -> Task:
    task: Task = added("tasks").get(name) or resolve_name(f"{__package__}.{name}:TASK")
    return task


def task_plan(config: Config) -> TaskPlan:
    """Return the driver's side of the config's task."""
    return resolve_name(task_named(config.model.task).plan)(config)


def experiment_class(task: str) -> Any:
    """Return the workers' side of a task, a subclass of :class:`~esmeray.training.tasks.experiment.Experiment`."""
    return resolve_name(task_named(task).experiment)


def before_training(config: Config) -> Config:
    """Make what training needs by inference, and return the config that names it."""
    name, task = config.model.task, task_named(config.model.task)
    if task.before is None:
        return config
    section = resolve_name(task.before)(config.run, config.data, getattr(config.model, name))
    return config.model_copy(update={"model": config.model.model_copy(update={name: section})})


def after_training(config: Config) -> None:
    """Make what belongs to a finished run."""
    task = task_named(config.model.task)
    if task.after is not None:
        resolve_name(task.after)(config.run, config.data, getattr(config.model, config.model.task))


def metric_labels() -> MetricLabels:
    """Return the words for the metrics of all tasks, by the metric's name."""
    return {name: label for task in (*TASKS, *added("tasks")) for name, label in task_named(task).metrics.items()}
