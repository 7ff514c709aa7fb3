"""The classifier: classes, labels or numbers of each labelled record, or a class of each residue."""

from training.tasks.task import Task

TASK = Task(
    section="train_config.classifier_schema:ClassifierSection",
    plan="training.tasks.classifier.plan:ClassifierPlan",
    experiment="training.tasks.classifier.experiment:ClassifierExperiment",
    open="model.export.classifier:load_classifier",
)
