"""The tasks by name. A new task is a package beside this file and its name here, or another package's entry point.

A part of a task is imported when it is first used: the driver must not wait for torch, nor the help for numpy.
"""

from pkgutil import resolve_name
from typing import Any, NamedTuple

from esmeray.installation import added, expect, imported
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
    return (*TASKS, *_added())


def task_named(name: str) -> Task:
    # By its package's name: no second list of modules is kept in step with the first.
    return _added().get(name) or resolve_name(f"esmeray.tasks.{name}.task:TASK")


def part_named(name: str) -> Any:
    """A part of a task, ``module:name``. Raises ConfigError if it is another package's and can't be imported."""
    return resolve_name(name) if name.startswith("esmeray.") else imported(lambda: resolve_name(name), name)


def metric_labels() -> MetricLabels:
    """Return the words for the metrics of all tasks, by the metric's name."""
    return {name: label for task in task_names() for name, label in task_named(task).metrics.items()}


def _added() -> dict[str, Task]:
    # A task's settings stand beside those of all models, as a field of a section.
    return added("tasks", (*TASKS, "task", "backbone", "tokenizer", *dir(Section)), Task, _checked)


def _checked(name: str, task: Task) -> Task:
    task.section.of()  # each setting has a default, since every experiment has the section
    for field in ("plan", "experiment", "summary"):
        expect(getattr(task, field), str, field)
    for label in task.metrics.values():
        expect(label, MetricLabel, "a metric")
    return task
