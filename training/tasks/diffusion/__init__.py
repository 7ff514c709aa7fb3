"""Sequence diffusion: hidden residues of a structure store, predicted from the structure and from the others."""

from training.tasks.task import Task

TASK = Task(
    section="train_config.diffusion_schema:DiffusionSection",
    plan="training.tasks.diffusion.plan:DiffusionPlan",
    experiment="training.tasks.diffusion.experiment:DiffusionExperiment",
    open="model.export.backbone:open_designer",
)
