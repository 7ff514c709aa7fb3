"""The classifier: classes, labels or numbers of each labelled record, or a class of each residue."""

from esmeray.run_folder.metrics_log import MetricLabel
from esmeray.training.tasks.registry import Task

TASK = Task(
    plan="esmeray.training.tasks.classifier.plan:ClassifierPlan",
    experiment="esmeray.training.tasks.classifier.experiment:ClassifierExperiment",
    metrics={
        "accuracy": MetricLabel("accuracy", "accuracy"),
        "f1_macro": MetricLabel("macro F1"),
        "mcc": MetricLabel(
            "MCC", "MCC", "Matthews' correlation of predicted and true classes; 0 is chance, 1 is perfect"
        ),
        # Where a record has one class, micro F1 is the accuracy.
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
