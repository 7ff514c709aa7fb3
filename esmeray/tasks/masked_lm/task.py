"""Entry of the task in the registry."""

from esmeray.tasks.masked_lm.section import MaskedLMSection
from esmeray.tasks.registry import RESIDUE_RECOVERY, Task

TASK = Task(
    section=MaskedLMSection,
    summary="predict masked residues",
    plan="esmeray.tasks.plan:ResiduePlan",
    experiment="esmeray.tasks.masked_lm.experiment:MaskedLMExperiment",
    metrics={"residue_recovery": RESIDUE_RECOVERY},
    next=("embed run --embed.models {run} --embed.input {input} --embed.output {name}-vectors",),
)
