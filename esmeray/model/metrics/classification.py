"""Metrics of a classifier, overall and per class, with bootstrap intervals.

Metrics are computed from the probabilities and targets of all records together, because metrics such as F1 are not
means over batches. They are floats by name. Undefined metrics are left out, such as the AUROC if all records belong to
one class; no value is NaN.

    classes       accuracy, balanced_accuracy, f1_macro, f1_micro, mcc, auroc, average_precision, ece
    multilabel    accuracy (all labels of a record right), f1_macro, f1_micro, auroc, average_precision, fmax, ece
    regression    mse, mae, r2, pearson, spearman: means over the columns that have them

AUROC and average precision are means over the classes for which they are defined (one class against the rest). With two
classes, they refer to the second class. Balanced accuracy is the mean recall of the classes that occur; F1 is the mean
over the classes that occur or are predicted.

Shape legend: N rows (records, or the concatenated residues of all records), C classes, labels or columns, S
resamplings, G records that the rows belong to.
"""

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from esmeray.common.errors import DivergenceError
from esmeray.common.statistics import percentile_interval, resamplings
from esmeray.dataset.section import TargetKind
from esmeray.dataset.targets import has_target, predicted_positive
from esmeray.model.metrics.weighted import Correlation, Metrics, Ranking, weighted_metrics

Values: TypeAlias = Tensor | ArrayLike

_ROUNDING = 1e-5
"""Tolerance for probabilities outside 0..1."""


def classification_metrics(
    kind: TargetKind, probabilities_NC: Values, targets: Values, weights: Values | None = None
) -> Metrics:
    """Compute every metric that is defined.

    Args:
        kind: kind of the targets.
        probabilities_NC: (N, C) as returned by :func:`esmeray.model.heads.losses.probabilities`.
        targets: (N,) integers with IGNORED_TARGET if missing, or (N, C) numbers with NaN if unknown.
        weights: (N,) weight of each row; 1 if None.

    Raises DivergenceError if a probability is NaN or infinite, and ValueError if the shapes don't match or a
    probability is outside 0..1.
    """
    rows = _ScoredRows(kind, probabilities_NC, targets, weights)
    return _defined(weighted_metrics(kind, rows.probabilities, rows.targets)(rows.weights)) if len(rows.targets) else {}


def bootstrap_intervals(
    kind: TargetKind,
    probabilities_NC: Values,
    targets: Values,
    samples: int,
    seed: int,
    *,
    weights: Values | None = None,
    groups: Values | None = None,
) -> dict[str, tuple[float, float]]:
    """Percentile intervals of the metrics from S resamplings of records (:mod:`esmeray.common.statistics`).

    In a resampling, means over classes include only the classes that occur in it. Resampling increases the calibration
    error on average, so its interval is biased upwards. A metric that is undefined in more than half of the resamplings
    has no interval. The same seed draws the same records, whatever the predictions.

    ``groups``: (N,) record of each row; residues are drawn by whole records. If None, each row is a record. Raises the
    same errors as :func:`classification_metrics`.
    """
    rows = _ScoredRows(kind, probabilities_NC, targets, weights, groups)
    if not len(rows.targets):
        return {}
    # Sort once for all resamplings: a resampling only changes the weights of the rows.
    metrics_of = weighted_metrics(kind, rows.probabilities, rows.targets)
    draws = resamplings(rows.num_groups, samples, seed)
    # Draw records with all their residues, because residues of one protein are not independent.
    resampled = [metrics_of(drawn_G[rows.groups] * rows.weights) for drawn_G in draws]
    intervals = {}
    for name in resampled[0] if resampled else ():
        interval = percentile_interval([metrics[name] for metrics in resampled])
        if interval is not None:
            intervals[name] = interval
    return intervals


def metrics_of_each(kind: TargetKind, probabilities_NC: Values, targets: Values) -> list[Metrics]:
    """Metrics per class, label or column, without weights.

    Returns C dictionaries with records, predicted, precision, recall, f1, auroc and average_precision; for regression
    with records, mse, mae, r2, pearson and spearman. Undefined metrics are left out. Raises the same errors as
    :func:`classification_metrics`.
    """
    rows = _ScoredRows(kind, probabilities_NC, targets)
    return [_defined(_metrics_of_column(kind, rows, c)) for c in range(rows.probabilities.shape[1])]


def confusion_matrix(probabilities_NC: Values, targets_N: Values) -> NDArray[np.int64]:
    """Return (C, C) numbers of rows by true class (first axis) and predicted class (second axis).

    Raises the same errors as :func:`classification_metrics`.
    """
    rows = _ScoredRows("multiclass", probabilities_NC, targets_N)
    num_classes = rows.probabilities.shape[1]
    cells_N = rows.targets * num_classes + rows.probabilities.argmax(axis=1)
    return np.bincount(cells_N, minlength=num_classes**2).reshape(num_classes, num_classes)


class _ScoredRows:
    """Rows with a target: float64 probabilities (N, C), targets, weights (N,), and groups (N,) numbered from 0."""

    def __init__(
        self,
        kind: TargetKind,
        probabilities_NC: Values,
        targets: Values,
        weights: Values | None = None,
        groups: Values | None = None,
    ) -> None:
        by_number = kind in ("multilabel", "regression")
        probabilities = _numpy(probabilities_NC, np.float64)
        wanted = _numpy(targets, np.float64 if by_number else np.int64)
        if probabilities.ndim != 2 or wanted.shape != (probabilities.shape if by_number else probabilities.shape[:1]):
            raise ValueError(
                f"{kind}: the shapes of probabilities {probabilities.shape} and targets {wanted.shape} do not match"
            )
        kept = has_target(wanted)
        self.probabilities, self.targets = probabilities[kept], wanted[kept]
        self.weights = np.ones(len(self.targets)) if weights is None else _numpy(weights, np.float64)[kept]
        named = np.arange(len(wanted)) if groups is None else _numpy(groups, np.int64)
        # Renumber the groups, so that records without any target are not drawn.
        present, self.groups = np.unique(named[kept], return_inverse=True)
        self.num_groups = len(present)
        unusable = int((~np.isfinite(self.probabilities)).any(axis=1).sum())
        if unusable:
            raise DivergenceError(
                f"the predictions of {unusable:,} of {len(self.targets):,} records are NaN or infinite, so "
                "metrics can't be computed: use an earlier checkpoint, or train with a lower learning rate"
            )
        if kind != "regression":
            # Rounding in a bf16 softmax or in sums may leave 0..1 slightly. Larger deviations mean logits.
            clipped = self.probabilities.clip(0, 1)
            if np.abs(clipped - self.probabilities).max(initial=0.0) > _ROUNDING:
                raise ValueError("not probabilities: some values are below 0 or above 1")
            self.probabilities = clipped


def _metrics_of_column(kind: TargetKind, rows: _ScoredRows, column: int) -> Metrics:
    scores_N = rows.probabilities[:, column]
    if kind == "regression":
        measured_N = rows.targets[:, column]
        return {"records": int(np.isfinite(measured_N).sum()), **Correlation(scores_N, measured_N)(rows.weights)}
    if kind == "multilabel":
        known_N = np.isfinite(rows.targets[:, column])
        truth_N = rows.targets[:, column] == 1
        predicted_N = predicted_positive(scores_N) & known_N
    else:
        known_N = np.ones(len(scores_N), dtype=bool)
        truth_N = rows.targets == column
        predicted_N = rows.probabilities.argmax(axis=1) == column
    hits, records, predicted = (int(rows_N.sum()) for rows_N in (truth_N & predicted_N, truth_N, predicted_N))
    return {
        "records": records,
        "predicted": predicted,
        "precision": hits / predicted if predicted else np.nan,
        "recall": hits / records if records else np.nan,
        "f1": 2 * hits / (records + predicted) if records + predicted else np.nan,
        **Ranking(scores_N, truth_N, known_N)(rows.weights),
    }


def _defined(metrics: Metrics) -> Metrics:
    """Return the metrics that are not NaN: counts as integers, others as floats."""
    defined = {name: value for name, value in metrics.items() if np.isfinite(value)}
    return {name: value if isinstance(value, int) else float(value) for name, value in defined.items()}


def _numpy(values: Values, dtype: type) -> NDArray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float().numpy() if values.dtype == torch.bfloat16 else values.numpy()  # NumPy has no bfloat16
    return np.ascontiguousarray(values, dtype=dtype)
