"""Metrics of a classifier, of each of its classes, and their bootstrap intervals.

In: probabilities and targets of all records together (metrics such as F1 are no means over batches). Out: floats by
name; an undefined metric, such as the AUROC where all records are of one class, is left out, and none is ever NaN.

    classes       accuracy, balanced_accuracy, f1_macro, f1_micro, mcc, auroc, average_precision, ece
    multilabel    accuracy (all labels of a record right), f1_macro, f1_micro, auroc, average_precision, fmax, ece
    regression    mse, mae, r2, pearson, spearman: means over the columns that have them

AUROC and average precision are means over the classes that have them (one class against the rest); of two classes, they
are those of the second. Balanced accuracy is the mean recall of the classes that occur, F1 the mean over the classes
that occur or are predicted.

Shape legend: N rows (records, or residues of all records end to end), C classes, labels or columns, S resamplings,
G records of which the rows are made.
"""

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from esmeray.common.errors import DivergenceError
from esmeray.common.statistics import percentile_interval, resamplings
from esmeray.dataset.labels.label_space import predicted_positive
from esmeray.dataset.section import TargetKind
from esmeray.dataset.targets import has_target
from esmeray.model.metrics.weighted import Correlation, Metrics, Ranking, weighted_metrics

Values: TypeAlias = Tensor | ArrayLike

_ROUNDING = 1e-5
"""By how much a probability may leave 0..1."""


def classification_metrics(
    kind: TargetKind, probabilities_NC: Values, targets: Values, weights: Values | None = None
) -> Metrics:
    """Every metric that is defined.

    ``probabilities_NC``: (N, C) as :func:`esmeray.model.heads.losses.probabilities` gives them. ``targets``: (N,)
    integers with IGNORED_TARGET where there is none, or (N, C) numbers with NaN where unknown. ``weights``: (N,), how
    often each row counts; once each, if None. Raises DivergenceError (a probability is NaN or infinite) or ValueError
    (the shapes don't fit, or a probability is not in 0..1).
    """
    rows = _Rows(kind, probabilities_NC, targets, weights)
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
    """Percentile intervals of the metrics, by resampling records S times (:mod:`esmeray.common.statistics`).

    In a resampling a mean over classes is that over the classes which occur in it. The calibration error of resampled
    records is on average above that of the records, so its interval leans upwards. A metric that is undefined in more
    than half of the resamplings has no interval. The same seed draws the same records, whatever the predictions.

    ``groups``: (N,) record that each row belongs to: residues are drawn by whole records. Each its own, if None. Raises
    as :func:`classification_metrics`.
    """
    rows = _Rows(kind, probabilities_NC, targets, weights, groups)
    if not len(rows.targets):
        return {}
    # Sorted once for all resamplings; a resampling is another weighting of the same rows.
    metrics_of = weighted_metrics(kind, rows.probabilities, rows.targets)
    draws = resamplings(rows.num_groups, samples, seed)
    # A record is drawn with all its residues: those of one protein are no independent observations.
    resampled = [metrics_of(drawn_G[rows.groups] * rows.weights) for drawn_G in draws]
    intervals = {}
    for name in resampled[0] if resampled else ():
        interval = percentile_interval([metrics[name] for metrics in resampled])
        if interval is not None:
            intervals[name] = interval
    return intervals


def metrics_of_each(kind: TargetKind, probabilities_NC: Values, targets: Values) -> list[Metrics]:
    """Metrics of each class, label or column, without weights.

    Returns C dictionaries: records, predicted, precision, recall, f1, auroc and average_precision; of regression,
    records, mse, mae, r2, pearson and spearman. What is undefined is left out. Raises DivergenceError, ValueError (as
    of :func:`classification_metrics`).
    """
    rows = _Rows(kind, probabilities_NC, targets)
    return [_defined(_metrics_of_column(kind, rows, c)) for c in range(rows.probabilities.shape[1])]


def confusion_matrix(probabilities_NC: Values, targets_N: Values) -> NDArray[np.int64]:
    """(C, C) rows of each true class (first axis) that were predicted as each class (second axis).

    Raises DivergenceError, ValueError (as of :func:`classification_metrics`).
    """
    rows = _Rows("multiclass", probabilities_NC, targets_N)
    num_classes = rows.probabilities.shape[1]
    cells_N = rows.targets * num_classes + rows.probabilities.argmax(axis=1)
    return np.bincount(cells_N, minlength=num_classes**2).reshape(num_classes, num_classes)


class _Rows:
    """Rows that have a target: float64 probabilities (N, C), targets, weights (N,) and groups (N,) from 0."""

    def __init__(
        self,
        kind: TargetKind,
        probabilities_NC: Values,
        targets: Values,
        weights: Values | None = None,
        groups: Values | None = None,
    ) -> None:
        by_number = kind in ("multilabel", "regression")
        every = _numpy(probabilities_NC, np.float64)
        wanted = _numpy(targets, np.float64 if by_number else np.int64)
        if every.ndim != 2 or wanted.shape != (every.shape if by_number else every.shape[:1]):
            raise ValueError(f"{kind}: probabilities {every.shape} and targets {wanted.shape} don't fit together")
        kept = has_target(wanted)
        self.probabilities, self.targets = every[kept], wanted[kept]
        self.weights = np.ones(len(self.targets)) if weights is None else _numpy(weights, np.float64)[kept]
        named = np.arange(len(wanted)) if groups is None else _numpy(groups, np.int64)
        # Numbered anew: a record without any target is not among those that are drawn.
        present, self.groups = np.unique(named[kept], return_inverse=True)
        self.num_groups = len(present)
        unusable = int((~np.isfinite(self.probabilities)).any(axis=1).sum())
        if unusable:
            raise DivergenceError(
                f"the predictions of {unusable:,} of {len(self.targets):,} records are NaN or infinite, so they have "
                "no metrics: take an earlier checkpoint, or train with a lower learning rate"
            )
        if kind != "regression":
            # A softmax in bf16 or a sum of several may leave 0..1 by rounding; logits are somebody's mistake.
            clipped = self.probabilities.clip(0, 1)
            if np.abs(clipped - self.probabilities).max(initial=0.0) > _ROUNDING:
                raise ValueError("these are no probabilities: some are below 0 or above 1")
            self.probabilities = clipped


def _metrics_of_column(kind: TargetKind, rows: _Rows, column: int) -> Metrics:
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
    """The metrics that are not NaN: counts as integers, others as floats."""
    return {
        name: value if isinstance(value, int) else float(value) for name, value in metrics.items() if np.isfinite(value)
    }


def _numpy(values: Values, dtype: type) -> NDArray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float().numpy() if values.dtype == torch.bfloat16 else values.numpy()  # NumPy has no bfloat16
    return np.ascontiguousarray(values, dtype=dtype)
