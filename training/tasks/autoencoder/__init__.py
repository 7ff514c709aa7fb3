"""The ESM-2 autoencoder: features of each residue of a store to a latent and back."""

from run_folder.metrics_log import MetricLabel
from training.tasks.registry import RESIDUE_RECOVERY, Task

TASK = Task(
    section="train_config.schema:AutoencoderSection",
    plan="training.tasks.autoencoder.plan:AutoencoderPlan",
    experiment="training.tasks.autoencoder.experiment:AutoencoderExperiment",
    metrics={
        "residue_recovery": RESIDUE_RECOVERY,
        "feature_r2": MetricLabel(
            "feature R², variance explained",
            "R²",
            "share of the features' variance that is reconstructed; below 0: worse than their mean",
        ),
    },
)
