"""The ESM-2 autoencoder: features of each residue of a store to a latent and back."""

from training.tasks.task import Task

TASK = Task(
    section="train_config.schema:AutoencoderSection",
    plan="training.tasks.autoencoder.plan:AutoencoderPlan",
    experiment="training.tasks.autoencoder.experiment:AutoencoderExperiment",
    open="model.export.backbone:open_autoencoder",
)
