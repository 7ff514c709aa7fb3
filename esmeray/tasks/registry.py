"""The tasks by name. A new task is a package next to this file plus its name here, or an entry point of another
package.

The parts of a task are imported on first use: the driver must not wait for torch, nor the help for numpy.
"""

from pkgutil import resolve_name
from typing import Any, NamedTuple

from esmeray.installation import added, expect, imported
from esmeray.run_folder.metrics_log import MetricLabel, MetricLabels
from esmeray.train_config.section import Section

TASKS = ("autoencoder", "masked_lm", "classifier", "diffusion", "terms", "contrastive")
"""Values of ``model.task``, and names of the packages; each package defines ``TASK`` in its module ``task``."""

RESIDUE_RECOVERY = MetricLabel(
    "recovery, share of residues right", "recovery", "share of the residues that are predicted right"
)
"""Label of ``residue_recovery``, a metric of every task on residues."""


class Task(NamedTuple):
    """The parts of a task. Parts that need more than the settings are named as ``module:name``.

    Attributes:
        section: class of the task's settings, which become ``model.NAME``.
        plan: the :class:`~esmeray.tasks.plan.TaskPlan`, for the driver.
        experiment: the :class:`~esmeray.tasks.experiment.Experiment`, for the workers. If a task has several, a
            function that chooses one by the model's settings.
        opener: function that opens an exported folder; returns a :class:`~esmeray.model.task_model.TaskModel`, in
            fp32 on the CPU, and its tokenizer. None if transformers alone opens the folder.
        summary: the task's purpose, for the help.
        metrics: labels of the metrics that are shown during training.
        before, after: inference before a run is trained and after it. Both take the sections run, data and the
            task's own; ``before`` returns the task's section as training uses it.
        lora: the task trains the adapters of model.backbone.lora; otherwise the setting is refused.
        next: commands that use a finished run. ``{run}`` is the folder or URI, ``{name}`` the name, and ``{input}``
            the training sequences.
    """

    section: type[Section]
    plan: str
    experiment: str
    opener: str | None = None
    summary: str = ""
    metrics: MetricLabels = {}  # noqa: RUF012 - a NamedTuple's defaults are shared, and this one is never changed
    before: str | None = None
    after: str | None = None
    lora: bool = True
    next: tuple[str, ...] = ()


def task_names() -> tuple[str, ...]:
    """Return the names of all tasks; tasks of other installed packages come last."""
    return (*TASKS, *_added())


def task_named(name: str) -> Task:
    # Imported by package name, so that no second list of modules needs to be maintained.
    return _added().get(name) or resolve_name(f"esmeray.tasks.{name}.task:TASK")


def part_named(name: str) -> Any:
    """Import a part of a task, ``module:name``. Raises ConfigError if another package's part can't be imported."""
    return resolve_name(name) if name.startswith("esmeray.") else imported(lambda: resolve_name(name), name)


def metric_labels() -> MetricLabels:
    """Return the labels of all tasks' metrics, by metric name."""
    return {name: label for task in task_names() for name, label in task_named(task).metrics.items()}


def _added() -> dict[str, Task]:
    # A task's settings are a field of the model section, so its name must not collide with other fields.
    return added("tasks", (*TASKS, "task", "backbone", "tokenizer", *dir(Section)), Task, _checked)


def _checked(name: str, task: Task) -> Task:
    task.section.of()  # every setting needs a default, since every experiment has the section
    for field in ("plan", "experiment", "summary"):
        expect(getattr(task, field), str, field)
    for label in task.metrics.values():
        expect(label, MetricLabel, "a metric")
    return task
