"""The line that a task's package is to the registry: where its parts are, each as ``module:name``.

A part is imported when it is first used: the driver must not wait for torch, nor a reader of settings for either.
"""

from pkgutil import resolve_name
from typing import Any, NamedTuple

from run_folder.metrics_log import MetricLabel, MetricLabels

RESIDUE_RECOVERY = MetricLabel(
    "recovery, share of residues right", "recovery", "share of the residues that are predicted right"
)
"""The label of ``residue_recovery``, which every task on residues has."""


class Task(NamedTuple):
    """The parts of a task; how its exports are opened stands in :mod:`model.export.opening`, which needs no training.

    Attributes:
        section: its settings, which stand in the schema as ``model.NAME``.
        plan: the :class:`~training.tasks.plan.TaskPlan`, for the driver.
        experiment: the :class:`~training.tasks.experiment.Experiment`, for the workers.
        metrics: words for those of its metrics that are shown while it trains.
    """

    section: str
    plan: str
    experiment: str
    metrics: MetricLabels

    def load(self, module: str) -> Any:
        """Import one of the parts."""
        return resolve_name(getattr(self, module))
