"""The tasks by name: the one place that knows them. A new task is a package beside this file and a line in ``TASKS``.

A task has two classes, since the driver must not wait for torch: a :class:`~training.tasks.plan.TaskPlan` for the
driver, an :class:`~training.tasks.experiment.Experiment` for the workers. Each is imported when it is first asked for.
"""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NamedTuple

from run_folder.paths import RunFolder
from train_config.schema import Config, DataSection
from training.tasks.plan import TaskPlan

if TYPE_CHECKING:
    from training.engine.context import WorkerContext
    from training.tasks.experiment import Experiment


class _Task(NamedTuple):
    """The classes of a task, each as ``module:name`` in this folder."""

    plan: str
    experiment: str


TASKS = {
    "autoencoder": _Task("residues.plan:AutoencoderPlan", "residues.experiment:AutoencoderExperiment"),
    "masked_lm": _Task("residues.plan:MaskedLMPlan", "residues.experiment:MaskedLMExperiment"),
    "diffusion": _Task("diffusion.plan:DiffusionPlan", "diffusion.experiment:DiffusionExperiment"),
    "classifier": _Task("classifier.plan:ClassifierPlan", "classifier.experiment:ClassifierExperiment"),
}


def task_plan(config: Config) -> TaskPlan:
    """Return the driver's side of the config's task."""
    return resolve_name(f"{__package__}.{TASKS[config.model.task].plan}")(config)


def experiment_class(task: str) -> type[Experiment]:
    """Return the workers' side of a task."""
    return resolve_name(f"{__package__}.{TASKS[task].experiment}")


def stage(task: str, data: DataSection, path: Path) -> Path:
    """Return where this node has the prepared data; copied and verified once in a process where it is to be staged."""
    if data.stage_dir is None:
        return path
    return experiment_class(task).stage(path, Path(data.stage_dir))


def open_experiment(config: Config, context: WorkerContext, run: RunFolder, path: Path) -> Experiment:
    """Open the config's task on the data of :meth:`TaskPlan.prepare`; the run has what its ``write_names`` wrote."""
    return experiment_class(config.model.task)(config, context, run, stage(config.model.task, config.data, path))
