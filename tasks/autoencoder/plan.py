"""The autoencoder before training."""

from typing import TYPE_CHECKING

from esmeray.tasks.plan import ResiduePlan
from esmeray.tasks.section import ModelSection

if TYPE_CHECKING:
    from esmeray.model.task_model import TaskModel


class AutoencoderPlan(ResiduePlan):
    """The autoencoder."""

    @staticmethod
    def empty_model(section: ModelSection) -> "TaskModel":
        from esmeray.tasks.autoencoder.model import ESM2Autoencoder  # here: it loads torch

        return ESM2Autoencoder.build(section, seed=0, empty=True)
