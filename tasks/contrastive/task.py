"""What the registry knows of the task."""

from esmeray.run_folder.metrics_log import MetricLabel
from esmeray.tasks.contrastive.section import ContrastiveSection
from esmeray.tasks.registry import Task

TASK = Task(
    section=ContrastiveSection,
    summary="place proteins of one group close to each other",
    plan="esmeray.tasks.contrastive.plan:ContrastivePlan",
    experiment="esmeray.tasks.contrastive.experiment:ContrastiveExperiment",
    metrics={
        "neighbour_accuracy": MetricLabel(
            "nearest is of the group, share",
            "neighbours",
            "share of the held-out sequences with a relative among them whose nearest one is of the same group",
        ),
    },
    next=(
        "embed run --embed.models {run} --embed.input {input} --embed.output {name}-vectors",
        "embed evaluate {name}-vectors --evaluate.labels labels.tsv --evaluate.output {name}-evaluation",
    ),
)
