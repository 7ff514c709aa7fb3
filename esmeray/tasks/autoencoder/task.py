"""Entry of the task in the registry."""

from esmeray.run_folder.metrics_log import MetricLabel
from esmeray.tasks.autoencoder.section import AutoencoderSection
from esmeray.tasks.registry import RESIDUE_RECOVERY, Task

TASK = Task(
    section=AutoencoderSection,
    summary="compress and reconstruct residue features",
    plan="esmeray.tasks.plan:ResiduePlan",
    experiment="esmeray.tasks.autoencoder.experiment:AutoencoderExperiment",
    opener="esmeray.tasks.autoencoder.model:open_autoencoder",
    lora=False,
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
