"""The ESM-2 autoencoder: features of each residue of a store to a latent and back."""

from esmeray.model.cost.memory import count_autoencoder_parameters
from esmeray.run_folder.metrics_log import MetricLabel
from esmeray.training.tasks.plan import ResiduePlan
from esmeray.training.tasks.registry import RESIDUE_RECOVERY, Task


class AutoencoderPlan(ResiduePlan):
    """The autoencoder before training."""

    count_parameters = staticmethod(count_autoencoder_parameters)


TASK = Task(
    plan="esmeray.training.tasks.autoencoder:AutoencoderPlan",
    experiment="esmeray.training.tasks.autoencoder.experiment:AutoencoderExperiment",
    metrics={
        "residue_recovery": RESIDUE_RECOVERY,
        "feature_r2": MetricLabel(
            "feature R², variance explained",
            "R²",
            "share of the features' variance that is reconstructed; below 0: worse than their mean",
        ),
    },
    next=(
        "embed run --embed.models {run} --embed.outputs mean_latents --embed.input {input} "
        "--embed.output {name}-latents",
    ),
)
