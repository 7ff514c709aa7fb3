"""Entry of the task in the registry."""

from esmeray.model.section import ClassifierSection
from esmeray.run_folder.metrics_log import MetricLabel
from esmeray.tasks.registry import Task

TASK = Task(
    section=ClassifierSection,
    summary="predict the labels of data.labels",
    plan="esmeray.tasks.classifier.plan:ClassifierPlan",
    experiment="esmeray.tasks.classifier.experiment:ClassifierExperiment",
    opener="esmeray.tasks.classifier.export:load_classifier",
    metrics={
        "accuracy": MetricLabel("accuracy", "accuracy"),
        "f1_macro": MetricLabel("macro F1"),
        "mcc": MetricLabel(
            "MCC", "MCC", "Matthews' correlation of predicted and true classes; 0 is chance, 1 is perfect"
        ),
        # With one class per record, micro F1 equals the accuracy.
        "f1_micro": MetricLabel("micro F1", repeats="mcc"),
        "spearman": MetricLabel("Spearman", "Spearman", "rank correlation of predicted and measured values"),
        "r2": MetricLabel(
            "R², variance explained",
            "R²",
            "share of the targets' variance that is predicted; below 0: worse than their mean",
        ),
    },
    next=(
        "classify evaluate {run}",
        "classify predict {run} --predict.input new.fasta --predict.output {name}-labels.csv",
    ),
)
