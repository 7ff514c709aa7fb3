"""The masked language model before training."""

from model.cost.memory import count_masked_lm_parameters
from training.tasks.residues.plan import ResiduePlan


class MaskedLMPlan(ResiduePlan):
    """The masked language model."""

    count_parameters = staticmethod(count_masked_lm_parameters)
