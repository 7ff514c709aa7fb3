"""Check of the classifier's settings against the kind of its targets: losses, pooling, and metrics of an evaluation.

Does not import torch, so that contradictions are reported at once.
"""

from esmeray.common.errors import ConfigError
from esmeray.dataset.section import TargetKind
from esmeray.model.section import ClassifierSection

_OF_CLASSES = ("accuracy", "balanced_accuracy", "f1_macro", "f1_micro", "mcc", "auroc", "average_precision", "ece")
METRICS: dict[TargetKind, tuple[str, ...]] = {
    "multiclass": _OF_CLASSES,
    "binary": _OF_CLASSES,
    "per_residue": _OF_CLASSES,
    "multilabel": ("accuracy", "f1_macro", "f1_micro", "auroc", "average_precision", "fmax", "ece"),
    "regression": ("mse", "mae", "r2", "pearson", "spearman"),
}
"""Metrics of :func:`esmeray.model.metrics.classification.classification_metrics`."""

LOWER_IS_BETTER = frozenset({"loss", "mse", "mae", "ece"})
"""Metrics for which a lower value is better. For all others a higher value is better."""


def check_loss(section: ClassifierSection, kind: TargetKind) -> None:
    """Raise ConfigError if settings of the loss don't match the kind of target."""
    # Refuse every setting that the loss would ignore, because ignored settings would seem to have an effect.
    if section.label_smoothing and kind in ("multilabel", "regression"):
        raise ConfigError(f"model.classifier.label_smoothing does not support data.labels.kind {kind}: set it to 0")
    if section.class_weights != "none" and kind == "regression":
        raise ConfigError("model.classifier.class_weights: regression has no classes; set it to none")
    if section.label_weights is not None and kind != "multilabel":
        raise ConfigError(f"model.classifier.label_weights needs data.labels.kind multilabel, not {kind}: remove it")


def best_metric(section: ClassifierSection, kind: TargetKind) -> str:
    """Metric that selects the best checkpoint. Raises ConfigError if evaluations of this kind don't have it."""
    name = section.best_metric
    if name == "auto":
        return {"multilabel": "f1_micro", "regression": "spearman"}.get(kind, "mcc")
    known = ("loss", *METRICS[kind])
    if name not in known:
        raise ConfigError(f"model.classifier.best_metric: {kind} has no metric {name!r}; available: {', '.join(known)}")
    return name


def check_pooling(section: ClassifierSection, kind: TargetKind, *, num_prefix: int = 1, causal: bool = False) -> None:
    """Raise ConfigError if the targets, the tokenizer or the backbone don't support the pooling."""
    pooling = section.pooling
    if kind == "per_residue" and pooling != "mean":
        raise ConfigError(
            f"model.classifier.pooling {pooling}: data.labels.kind per_residue does not pool; leave it at mean"
        )
    if pooling == "cls" and num_prefix == 0:
        raise ConfigError(
            "model.classifier.pooling cls: this tokenizer adds no token before a sequence; use mean, max or last"
        )
    if pooling == "cls" and causal:
        raise ConfigError(
            "model.classifier.pooling cls: in a decoder the first token does not see the sequence; use last"
        )
