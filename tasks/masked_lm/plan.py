"""The masked language model before training."""

from typing import TYPE_CHECKING

from esmeray.tasks.plan import ResiduePlan
from esmeray.tasks.section import ModelSection

if TYPE_CHECKING:
    from esmeray.model.task_model import TaskModel


class MaskedLMPlan(ResiduePlan):
    """The masked language model."""

    @staticmethod
    def empty_model(section: ModelSection) -> "TaskModel":
        from esmeray.tasks.masked_lm.model import MaskedLM  # here: it loads torch

        return MaskedLM.build(section, seed=0, empty=True)
