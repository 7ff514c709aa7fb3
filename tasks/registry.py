"""The tasks by name. A new task is a package beside this file and its name here, or another package's entry point.

A part of a task is imported when it is first used: the driver must not wait for torch, nor the help for numpy.
"""

from pkgutil import resolve_name
from typing import NamedTuple

from esmeray.installation import added
from esmeray.run_folder.metrics_log import MetricLabel, MetricLabels
from esmeray.train_config.section import Section

TASKS = ("autoencoder", "masked_lm", "classifier", "diffusion", "terms", "contrastive")
"""Names of ``model.task`` and of the packages, each of which has a ``TASK`` in its module ``task``."""

RESIDUE_RECOVERY = MetricLabel(
    "recovery, share of residues right", "recovery", "share of the residues that are predicted right"
)
"""The label of ``residue_recovery``, which every task on residues has."""


class Task(NamedTuple):
    """The parts of a task; those that need more than its settings are each named as ``module:name``.

    Attributes:
        section: its settings, which are ``model.NAME``.
        plan: the :class:`~esmeray.tasks.plan.TaskPlan`, for the driver.
        experiment: the :class:`~esmeray.tasks.experiment.Experiment`, for the workers; or, of a task that has several,
            a function that chooses one by the model's settings.
        opener: from the folder of an export to its :class:`~esmeray.model.task_model.TaskModel`, in fp32 on the CPU,
            and its tokenizer; None where transformers alone opens it.
        summary: what it is for, for the help.
        metrics: words for those of its metrics that are shown while it trains.
        before, after: what is made by inference before a run is trained and after it; both take the sections run, data
            and the task's own, and the first returns the last of these as training reads it.
        next: commands that use a finished run, of which ``{run}`` is the folder or URI, ``{name}`` the name, and
            ``{input}`` are the sequences that it was trained on.
    """

    section: type[Section]
    plan: str
    experiment: str
    opener: str | None = None
    summary: str = ""
    metrics: MetricLabels = {}  # noqa: RUF012 - a NamedTuple's defaults are shared, and nobody writes to this one
    before: str | None = None
    after: str | None = None
    next: tuple[str, ...] = ()


def task_names() -> tuple[str, ...]:
    """Names of all tasks, those of other installed packages last."""
    return (*TASKS, *added("tasks", TASKS))


def task_named(name: str) -> Task:
    # By its package's name: no second list of modules is kept in step with the first.
    return added("tasks", TASKS).get(name) or resolve_name(f"esmeray.tasks.{name}.task:TASK")


def metric_labels() -> MetricLabels:
    """Return the words for the metrics of all tasks, by the metric's name."""
    return {name: label for task in task_names() for name, label in task_named(task).metrics.items()}
