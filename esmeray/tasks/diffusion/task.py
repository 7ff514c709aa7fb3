"""Entry of the task in the registry."""

from esmeray.run_folder.metrics_log import MetricLabel
from esmeray.tasks.diffusion.section import DiffusionSection
from esmeray.tasks.registry import RESIDUE_RECOVERY, Task

TASK = Task(
    section=DiffusionSection,
    summary="generate sequences for structures",
    plan="esmeray.tasks.diffusion.plan:DiffusionPlan",
    experiment="esmeray.tasks.diffusion.experiment:DiffusionExperiment",
    opener="esmeray.tasks.diffusion.model:open_export",
    lora=False,
    metrics={
        "residue_recovery": RESIDUE_RECOVERY,
        "unconditional_loss": MetricLabel("validation, without structure or label", is_loss=True),
    },
    next=("design generate {run} --generate.structures fold.pdb --generate.output {name}-designs",),
)
