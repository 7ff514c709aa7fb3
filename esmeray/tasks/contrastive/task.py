"""Entry of the task in the registry."""

from esmeray.tasks.contrastive.section import ContrastiveSection
from esmeray.tasks.registry import Task

TASK = Task(
    section=ContrastiveSection,
    summary="place proteins of one group close to each other",
    plan="esmeray.tasks.contrastive.plan:ContrastivePlan",
    experiment="esmeray.tasks.contrastive.experiment:ContrastiveExperiment",
    next=(
        "embed run --embed.models {run} --embed.input proteins.fasta --embed.output {name}-vectors",
        "embed evaluate {name}-vectors --evaluate.labels labels.tsv --evaluate.output {name}-evaluation.json",
    ),
)
