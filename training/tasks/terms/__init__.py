"""Function prediction: terms of an ontology for each protein, by a head on vectors, or by a backbone."""

from esmeray.training.tasks.registry import Task

TASK = Task(
    plan="esmeray.training.tasks.terms.plan:TermsPlan",
    experiment="esmeray.training.tasks.terms.experiment:TermsExperiment",
    metrics={},  # those of the classifier
    before="esmeray.inference.function.vectors:with_vectors",
    after="esmeray.inference.function.blend:finish",
    next=("function predict {run} --predict.input new.fasta --predict.output {name}-terms.tsv",),
)
