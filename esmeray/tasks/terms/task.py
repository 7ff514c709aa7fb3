"""Entry of the task in the registry."""

from esmeray.tasks.registry import Task
from esmeray.tasks.terms.section import TermsSection

TASK = Task(
    section=TermsSection,
    summary="predict functions of proteins",
    plan="esmeray.tasks.terms.plan:TermsPlan",
    experiment="esmeray.tasks.terms.experiment:experiment_of",
    opener="esmeray.tasks.terms.model:refuse_sequences",
    metrics={},  # the classifier's metrics apply
    before="esmeray.inference.function.vectors:with_vectors",
    after="esmeray.inference.function.prediction:finish",
    next=("function predict {run} --predict.input new.fasta --predict.output {name}-terms.tsv",),
)
