"""How well a classifier does: its figures, those of each class, and the intervals that chance alone could explain.

In: probabilities and targets of all records together (figures such as F1 are no means over batches). Out: floats by
name; what is undefined, such as the AUROC of one class alone, is left out, and nothing is ever NaN.

    classes       accuracy, balanced_accuracy, f1_macro, f1_micro, mcc, auroc, average_precision, ece
    multilabel    accuracy (all labels of a record right), f1_macro, f1_micro, auroc, average_precision, fmax, ece
    regression    mse, mae, r2, pearson, spearman: means over the columns that have them

AUROC and average precision are means over the classes that have them (one class against the rest); of two classes, they
are those of the second. Where every class occurs all figures are scikit-learn's; see :mod:`model.metrics.weighted`.

Figures without weights come from torchmetrics, so that they can be set beside others'. What it can't do is done there:
weights and resamplings, for which it has no arguments; Fmax; and those that torchmetrics 1.9 has in single precision or
with constants added (Matthews' coefficient of one class alone is 1, Spearman's of a constant is 0, R² is 0 or 1 where
the squares sum to below 1e-4, balanced accuracy counts classes that were predicted but never occur).

Shape legend: N rows (records, or residues of all records end to end), C classes, labels or columns, S resamplings,
G records of which the rows are made.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    binary_calibration_error,
    multiclass_confusion_matrix,
    multilabel_f1_score,
)
from torchmetrics.functional.regression import mean_absolute_error, mean_squared_error, pearson_corrcoef

from common.errors import DivergenceError
from dataset.labels.label_space import called
from dataset.packed_batch import IGNORED_TARGET
from model.metrics.weighted import (
    CALIBRATION_BINS,
    Correlation,
    ProteinCentric,
    figures_of_counts,
    positive_classes,
    weighted_figures,
)
from train_config.classifier_schema import TargetKind

Values: TypeAlias = Tensor | ArrayLike

_UNKNOWN = -1
_ROUNDING = 1e-5
"""By how much a probability may leave 0..1."""
_NUMBERS_AT_ONCE = 2**18
"""Weights of resamplings that are worked on together: 2 MiB, which a core's cache holds."""
_MOST_UNDEFINED = 0.5
"""Share of the resamplings in which a figure may be undefined and still get an interval."""


def classification_figures(
    kind: TargetKind, probabilities_NC: Values, targets: Values, weights: Values | None = None
) -> dict[str, float]:
    """Every figure that is defined.

    Args:
        kind: of the targets.
        probabilities_NC: (N, C) as :func:`probabilities` gives them.
        targets: (N,) integers with IGNORED_TARGET where there is none, or (N, C) numbers with NaN where unknown.
        weights: (N,), how often each row counts; once each, if None.

    Raises:
        DivergenceError: a probability is NaN or infinite.
        ValueError: the shapes don't fit, or a probability is not in 0..1.
    """
    rows = _Rows(kind, probabilities_NC, targets, weights)
    if not len(rows.targets):
        return {}
    if rows.weights is not None:
        figures: dict[str, Any] = weighted_figures(kind, rows.probabilities, rows.targets)(rows.weights[:, None])
    else:
        figures = _POINT.get(kind, _class_figures)(kind, rows.probabilities, rows.targets)
    return _defined(figures)


def bootstrap_intervals(
    kind: TargetKind,
    probabilities_NC: Values,
    targets: Values,
    samples: int,
    seed: int,
    share: float = 0.95,
    *,
    weights: Values | None = None,
    groups: Values | None = None,
) -> dict[str, tuple[float, float]]:
    """Percentile intervals (Efron and Tibshirani 1993, section 13.3) of the figures, by resampling records.

    In a resampling a mean over classes is that over the classes which occur in it. The calibration error of resampled
    records is on average above that of the records, so its interval leans upwards. A figure that is undefined in more
    than half of the resamplings has no interval. The same seed draws the same records, whatever the predictions.

    Args:
        kind: as of :func:`classification_figures`, like the next two.
        probabilities_NC: (N, C).
        targets: (N,) or (N, C).
        samples: S, how often to draw all records anew, with replacement.
        seed: of the draws.
        share: of the resampled figures that lie within the interval.
        weights: (N,) as of :func:`classification_figures`.
        groups: (N,) record that each row belongs to: residues are drawn by whole records. Each its own, if None.

    Raises:
        DivergenceError: a probability is NaN or infinite.
        ValueError: the shapes don't fit.
    """
    rows = _Rows(kind, probabilities_NC, targets, weights, groups)
    if not len(rows.targets):
        return {}
    figures_of = weighted_figures(kind, rows.probabilities, rows.targets)
    generator = np.random.default_rng(seed)
    columns = max(1, min(samples, _NUMBERS_AT_ONCE // len(rows.targets)))
    parts: list[dict[str, NDArray[np.float64]]] = []
    for first in range(0, samples, columns):
        drawn_GS = _drawn(generator, rows.num_groups, min(columns, samples - first))
        weights_NS = drawn_GS if rows.groups is None else drawn_GS[rows.groups]
        parts.append(figures_of(weights_NS if rows.weights is None else weights_NS * rows.weights[:, None]))
    intervals = {name: _interval(np.concatenate([part[name] for part in parts]), share) for name in parts[0]}
    return {name: interval for name, interval in intervals.items() if interval is not None}


def figures_of_each(kind: TargetKind, probabilities_NC: Values, targets: Values) -> list[dict[str, float]]:
    """Figures of each class, label or column, without weights.

    Returns:
        C dictionaries: records, predicted, precision, recall, f1, auroc and average_precision; of regression, records,
        mse, mae, r2, pearson and spearman. What is undefined is left out.

    Raises:
        DivergenceError, ValueError: as of :func:`classification_figures`.
    """
    rows = _Rows(kind, probabilities_NC, targets)
    return [_defined(_figures_of_one(kind, rows, c)) for c in range(rows.probabilities.shape[1])]


def confusion_matrix(probabilities_NC: Values, targets_N: Values) -> NDArray[np.int64]:
    """(C, C) rows of each true class (first axis) that were taken for each class (second axis).

    Raises:
        DivergenceError, ValueError: as of :func:`classification_figures`.
    """
    rows = _Rows("multiclass", probabilities_NC, targets_N)
    return _confusion(rows.probabilities, rows.targets).numpy()


class _Rows:
    """Rows that have a target, in double precision, with what belongs to them.

    Attributes:
        probabilities: (N, C) float64.
        targets: (N,) int64, or (N, C) float64 with NaN where unknown.
        weights: (N,) float64, or None.
        groups: (N,) int64 in 0..num_groups-1, or None.
        num_groups: records that the rows are made of.
    """

    def __init__(
        self,
        kind: TargetKind,
        probabilities_NC: Values,
        targets: Values,
        weights: Values | None = None,
        groups: Values | None = None,
    ) -> None:
        by_number = kind in ("multilabel", "regression")
        every, wanted = _numpy(probabilities_NC, np.float64), _numpy(targets, np.float64 if by_number else np.int64)
        if every.ndim != 2 or wanted.shape != (every.shape if by_number else every.shape[:1]):
            raise ValueError(f"{kind}: probabilities {every.shape} and targets {wanted.shape} don't fit together")
        kept = np.isfinite(wanted).any(axis=1) if by_number else wanted != IGNORED_TARGET
        self.probabilities, self.targets = every[kept], wanted[kept]
        self.weights = None if weights is None else _numpy(weights, np.float64)[kept]
        self.groups, self.num_groups = None, len(self.targets)
        if groups is not None:
            present, self.groups = np.unique(_numpy(groups, np.int64)[kept], return_inverse=True)
            self.num_groups = len(present)
        unusable = int((~np.isfinite(self.probabilities)).any(axis=1).sum())
        if unusable:
            raise DivergenceError(
                f"the predictions of {unusable:,} of {len(self.targets):,} records are NaN or infinite, so nothing can "
                "be said of them: take an earlier checkpoint, or train with a lower learning rate"
            )
        if kind != "regression":
            self.probabilities = _clipped(self.probabilities)


def _clipped(probabilities_NC: NDArray) -> NDArray:
    clipped_NC = probabilities_NC.clip(0, 1)
    if np.abs(clipped_NC - probabilities_NC).max(initial=0.0) > _ROUNDING:
        raise ValueError("these are no probabilities: some are below 0 or above 1")
    return clipped_NC


def _class_figures(kind: TargetKind, probabilities_NC: NDArray, targets_N: NDArray) -> dict[str, Any]:
    confusion = _confusion(probabilities_NC, targets_N).double().numpy()
    counted = figures_of_counts(confusion.diagonal()[:, None], confusion.sum(1)[:, None], confusion.sum(0)[:, None])
    ranked = positive_classes(kind, probabilities_NC.shape[1])
    rankings = [_ranking_figures(probabilities_NC[:, c], targets_N == c) for c in ranked]
    confidences_N = torch.from_numpy(probabilities_NC.max(axis=1))
    correct_N = torch.from_numpy(probabilities_NC.argmax(axis=1) == targets_N)
    return {**counted, **_means(rankings), "ece": _calibration_error(confidences_N, correct_N)}


def _label_figures(kind: TargetKind, probabilities_NC: NDArray, targets_NC: NDArray) -> dict[str, Any]:
    known_NC, truth_NC = np.isfinite(targets_NC), targets_NC == 1
    predicted_NC = called(probabilities_NC)
    exact_N = ((predicted_NC == truth_NC) | ~known_NC).all(axis=1)
    labels = (torch.from_numpy(values) for values in (predicted_NC.astype(np.int64), _marked(truth_NC, known_NC)))
    predicted, truth = labels
    columns = zip(probabilities_NC.T, truth_NC.T, known_NC.T, strict=True)
    rankings = [_ranking_figures(scores[known], labelled[known]) for scores, labelled, known in columns]
    f1_macro, f1_micro = (
        multilabel_f1_score(
            predicted, truth, truth.shape[1], average=average, ignore_index=_UNKNOWN, validate_args=False
        )
        for average in ("macro", "micro")
    )
    fmax = ProteinCentric(probabilities_NC, truth_NC, known_NC)(np.ones((len(truth_NC), 1)))
    confidences = torch.from_numpy(probabilities_NC[known_NC])
    return {
        "accuracy": exact_N.mean(),
        "f1_macro": f1_macro,
        "f1_micro": f1_micro if (predicted_NC & known_NC).any() or truth_NC.any() else np.nan,
        **_means(rankings),
        "fmax": fmax,
        "ece": _calibration_error(confidences, torch.from_numpy(truth_NC[known_NC])),
    }


def _number_figures(kind: TargetKind, predicted_NC: NDArray, measured_NC: NDArray) -> dict[str, Any]:
    return _means([_column_figures(*pair) for pair in zip(predicted_NC.T, measured_NC.T, strict=True)])


_POINT = {"multilabel": _label_figures, "regression": _number_figures}


def _figures_of_one(kind: TargetKind, rows: _Rows, column: int) -> dict[str, Any]:
    scores_N = rows.probabilities[:, column]
    if kind == "regression":
        measured_N = rows.targets[:, column]
        return {"records": np.isfinite(measured_N).sum(), **_column_figures(scores_N, measured_N)}
    if kind == "multilabel":
        known_N = np.isfinite(rows.targets[:, column])
        truth_N, scores_N = rows.targets[known_N, column] == 1, scores_N[known_N]
        predicted_N = called(scores_N)
    else:
        truth_N, predicted_N = rows.targets == column, rows.probabilities.argmax(axis=1) == column
    hits, records, predicted = (int(rows_N.sum()) for rows_N in (truth_N & predicted_N, truth_N, predicted_N))
    return {
        "records": records,
        "predicted": predicted,
        "precision": hits / predicted if predicted else np.nan,
        "recall": hits / records if records else np.nan,
        "f1": 2 * hits / (records + predicted) if records + predicted else np.nan,
        **_ranking_figures(scores_N, truth_N),
    }


def _column_figures(predicted_N: NDArray, measured_N: NDArray) -> dict[str, Any]:
    known_N = np.isfinite(measured_N)
    predicted_N, measured_N = predicted_N[known_N], measured_N[known_N]
    if not len(measured_N):
        return {}
    figures: dict[str, Any] = Correlation(predicted_N, measured_N)(np.ones((len(measured_N), 1)))
    pair = torch.from_numpy(predicted_N), torch.from_numpy(measured_N)
    figures |= {"mse": mean_squared_error(*pair), "mae": mean_absolute_error(*pair)}
    if np.isfinite(figures["pearson"]):
        figures["pearson"] = pearson_corrcoef(*pair)
    return figures


def _ranking_figures(scores_N: NDArray, positive_N: NDArray) -> dict[str, Any]:
    """AUROC and average precision of one class, as far as there are positives and negatives."""
    if not positive_N.any():
        return {}
    scores, positive = torch.from_numpy(scores_N.copy()), torch.from_numpy(positive_N.astype(np.int64))
    figures = {"average_precision": binary_average_precision(scores, positive, validate_args=False)}
    if not positive_N.all():
        figures["auroc"] = binary_auroc(scores, positive, validate_args=False)
    return figures


def _calibration_error(confidences: Tensor, outcomes: Tensor) -> Tensor:
    """Of the likeliest class, or of each label; in double precision, which multiclass_calibration_error leaves."""
    return binary_calibration_error(confidences, outcomes.long(), n_bins=CALIBRATION_BINS, validate_args=False)


def _confusion(probabilities_NC: NDArray, targets_N: NDArray) -> Tensor:
    predicted = torch.from_numpy(probabilities_NC.argmax(axis=1))
    num_classes = probabilities_NC.shape[1]
    return multiclass_confusion_matrix(predicted, torch.from_numpy(targets_N), num_classes, validate_args=False)


def _marked(truth_NC: NDArray, known_NC: NDArray) -> NDArray[np.int64]:
    return np.where(known_NC, truth_NC, _UNKNOWN).astype(np.int64)


def _means(each: list[dict[str, Any]]) -> dict[str, float]:
    """The mean of each figure over those that have it."""
    defined = [_defined(figures) for figures in each]
    names = dict.fromkeys(name for figures in defined for name in figures)
    return {name: float(np.mean([figures[name] for figures in defined if name in figures])) for name in names}


def _defined(figures: dict[str, Any]) -> dict[str, float]:
    """As floats, what is not NaN."""
    floats = {name: float(np.asarray(value).item()) for name, value in figures.items()}
    return {name: value for name, value in floats.items() if np.isfinite(value)}


def _drawn(generator: np.random.Generator, records: int, samples: int) -> NDArray[np.float64]:
    """(records, samples): how often each record was drawn."""
    draws = (generator.integers(records, size=records) for _ in range(samples))
    return np.stack([np.bincount(drawn, minlength=records) for drawn in draws], axis=1).astype(np.float64)


def _interval(values_S: NDArray[np.float64], share: float) -> tuple[float, float] | None:
    values_S, samples = values_S[np.isfinite(values_S)], len(values_S)
    if len(values_S) < max(1, _MOST_UNDEFINED * samples):
        return None
    low, high = np.quantile(values_S, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def _numpy(values: Values, dtype: type) -> NDArray:
    if isinstance(values, Tensor):
        values = (values.detach().float() if values.dtype == torch.bfloat16 else values.detach()).cpu().numpy()
    return np.ascontiguousarray(values, dtype=dtype)
