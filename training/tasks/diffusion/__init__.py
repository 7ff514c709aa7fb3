"""Sequence diffusion: hidden residues of a structure store, predicted from the structure and from the others."""

from esmeray.run_folder.metrics_log import MetricLabel
from esmeray.training.tasks.registry import RESIDUE_RECOVERY, Task

TASK = Task(
    plan="esmeray.training.tasks.diffusion.plan:DiffusionPlan",
    experiment="esmeray.training.tasks.diffusion.experiment:DiffusionExperiment",
    metrics={
        "residue_recovery": RESIDUE_RECOVERY,
        "unconditional_loss": MetricLabel("validation, without structure or label", is_loss=True),
    },
    next=("design generate {run} --generate.structures fold.pdb --generate.output {name}-designs",),
)
