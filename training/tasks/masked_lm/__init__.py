"""Masked language modelling: the residues of a store, some of which are hidden and predicted."""

from esmeray.model.cost.memory import count_masked_lm_parameters
from esmeray.training.tasks.plan import ResiduePlan
from esmeray.training.tasks.registry import RESIDUE_RECOVERY, Task


class MaskedLMPlan(ResiduePlan):
    """The masked language model before training."""

    count_parameters = staticmethod(count_masked_lm_parameters)


TASK = Task(
    plan="esmeray.training.tasks.masked_lm:MaskedLMPlan",
    experiment="esmeray.training.tasks.masked_lm.experiment:MaskedLMExperiment",
    metrics={"residue_recovery": RESIDUE_RECOVERY},
    next=("embed run --embed.models {run} --embed.input {input} --embed.output {name}-vectors",),
)
