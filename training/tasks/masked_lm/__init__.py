"""Masked language modelling: the residues of a store, some of which are hidden and predicted."""

from training.tasks.registry import RESIDUE_RECOVERY, Task

TASK = Task(
    section="train_config.schema:MaskedLMSection",
    plan="training.tasks.masked_lm.plan:MaskedLMPlan",
    experiment="training.tasks.masked_lm.experiment:MaskedLMExperiment",
    metrics={"residue_recovery": RESIDUE_RECOVERY},
)
