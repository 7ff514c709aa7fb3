"""Function prediction: terms of an ontology for each protein, by a head on vectors, or by a backbone."""

from training.tasks.registry import Task

TASK = Task(
    section="train_config.terms_schema:TermsSection",
    plan="training.tasks.terms.plan:TermsPlan",
    experiment="training.tasks.terms.experiment:TermsExperiment",
    metrics={},  # those of the classifier
    before="inference.function.vectors:with_vectors",
    after="inference.function.blend:finish",
    next=("function predict {run} --predict.input new.fasta --predict.output {name}-terms.tsv",),
)
