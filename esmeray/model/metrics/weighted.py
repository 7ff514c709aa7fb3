"""Metrics of weighted records, as NumPy sums that are fast enough for a thousand resamplings.

Everything that does not depend on weights (order of scores, bins of confidences, predicted classes) is computed once;
each weighting then takes a few sums. A record of weight 2 counts as two records. If all classes occur, the values are
the same as from scikit-learn, whose functions sort and check the predictions again for each weighting
(docs/classifier.md).

Objects take predictions and targets. Calls take weights (N,) and return metrics by name, NaN if undefined.

Shape legend: N rows (records, or residues), C classes, labels or columns, U distinct values, T thresholds.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esmeray.common.statistics import counts_reaching, f_measure, ratio
from esmeray.dataset.labels.label_space import predicted_positive
from esmeray.dataset.section import TargetKind

Floats = NDArray[np.float64]
Metrics = dict[str, float]
"""Value of each metric; NaN if it is undefined."""

CALIBRATION_BINS = 15
"""Number of bins of equal width, as in Guo et al. 2017."""
_THRESHOLDS = np.arange(1, 101, dtype=np.float32) / np.float32(100)
"""CAFA's thresholds: 0.01 to 1 in steps of 0.01."""
_SMALLEST = np.finfo(np.float64).tiny
_ROUNDING = 1e-12
"""Share of a sum below which a difference of sums is a rounding error."""


def weighted_metrics(kind: TargetKind, probabilities_NC: Floats, targets: NDArray) -> Callable[[Floats], Metrics]:
    """Return a function that computes the metrics for non-negative weights (N,).

    ``probabilities_NC``: (N, C) float64 in 0..1; for regression, the predicted numbers, which must be finite.
    ``targets``: (N,) int64 in 0..C-1, without missing targets; or (N, C) with NaN if unknown.
    """
    if kind == "multilabel":
        return _Labels(probabilities_NC, targets)
    if kind == "regression":
        columns = [Correlation(*column) for column in zip(probabilities_NC.T, targets.T, strict=True)]
        return lambda weights_N: _means([column(weights_N) for column in columns])
    return _Classes(probabilities_NC, targets, binary=kind == "binary")


class Ranking:
    """AUROC and average precision of one class. Ties count half in AUROC and are a single step of the precision.

    ``scores_N``: higher scores mean the class is more likely. ``known_N``: rows that count.
    """

    def __init__(self, scores_N: Floats, positive_N: NDArray[np.bool_], known_N: NDArray[np.bool_]) -> None:
        known = np.flatnonzero(known_N)
        positives = np.flatnonzero(positive_N & known_N)
        order = np.argsort(-scores_N[known], kind="stable")
        # int32 halves the memory of a ranking; thousands of labels have one each.
        self._rows, self._positives = known[order].astype(np.int32), positives.astype(np.int32)
        # Steps at the scores of positives only, which are few for a rare label. Negatives between two of them are
        # summed in one step.
        distinct_U, self._ties = np.unique(-scores_N[positives], return_inverse=True)
        ranked_N = -scores_N[self._rows]
        self._starts_U, self._ends_U = (np.searchsorted(ranked_N, distinct_U, side) for side in ("left", "right"))

    def __call__(self, weights_N: Floats) -> Metrics:
        """Return ``auroc`` and ``average_precision``. Both are NaN without positives, AUROC also without negatives."""
        running = np.append(0.0, np.cumsum(weights_N[self._rows]))
        hits_U = np.bincount(self._ties, weights_N[self._positives])
        above_U = np.cumsum(hits_U)
        positives = above_U[-1] if len(above_U) else 0.0
        negatives = running[-1] - positives
        if not positives:
            return {"auroc": np.nan, "average_precision": np.nan}
        before_U, after_U = running[self._starts_U], running[self._ends_U]
        # Negatives above a score, and half of the negatives that tie with it.
        misses_U = (before_U - (above_U - hits_U) + after_U - above_U) / 2
        # Not > 0, because running sums have rounding errors if there are no negatives.
        defined = negatives > _ROUNDING * running[-1]
        return {
            "auroc": 1 - hits_U @ misses_U / (positives * negatives) if defined else np.nan,
            "average_precision": hits_U @ (above_U / np.maximum(after_U, _SMALLEST)) / positives,
        }


class Correlation:
    """Errors and correlations of one column of numbers.

    R² is 1 - residual sum of squares / total sum of squares. Spearman's coefficient is Pearson's coefficient of the
    mid-ranks. R² and the correlations are undefined if the target is constant, the correlations also if the prediction
    is constant. ``measured_N``: numbers, NaN if unknown.
    """

    def __init__(self, predicted_N: Floats, measured_N: Floats) -> None:
        self._rows = np.flatnonzero(np.isfinite(measured_N))
        self._predicted, self._measured = predicted_N[self._rows], measured_N[self._rows]
        self._errors = self._predicted - self._measured
        self._predicted_ties, self._measured_ties = (
            np.unique(values, return_inverse=True)[1] for values in (self._predicted, self._measured)
        )

    def __call__(self, weights_N: Floats) -> Metrics:
        """Return mse, mae, r2, pearson and spearman."""
        weights = weights_N[self._rows]
        if not weights.sum():  # the resampling has no known record of this column
            return dict.fromkeys(("mse", "mae", "r2", "pearson", "spearman"), np.nan)
        squared = np.average(self._errors**2, weights=weights)
        measured = _deviations(self._measured, weights)
        predicted_ranks, measured_ranks = (
            _deviations(_mid_ranks(ties, weights), weights) for ties in (self._predicted_ties, self._measured_ties)
        )
        return {
            "mse": squared,
            "mae": np.average(np.abs(self._errors), weights=weights),
            "r2": 1 - _ratio(squared, np.average(measured**2, weights=weights)),
            "pearson": _correlation(_deviations(self._predicted, weights), measured, weights),
            "spearman": _correlation(predicted_ranks, measured_ranks, weights),
        }


class _Classes:
    """Metrics for rows with one of several classes each."""

    def __init__(self, probabilities_NC: Floats, targets_N: NDArray[np.int64], binary: bool) -> None:
        self._num_classes = probabilities_NC.shape[1]
        self._targets_N, self._predicted_N = targets_N, probabilities_NC.argmax(axis=1)
        self._right_N = self._predicted_N == targets_N
        # For two classes rank the second only: the ranking of the first is its mirror image.
        ranked = [1] if binary else np.unique(targets_N)
        every_N = np.ones(len(targets_N), dtype=bool)
        self._rankings = [Ranking(probabilities_NC[:, c], targets_N == c, every_N) for c in ranked]
        confidences_N1, right_N1 = probabilities_NC.max(axis=1, keepdims=True), self._right_N[:, None]
        self._calibration = CalibrationError(confidences_N1, right_N1, np.ones_like(right_N1))

    def __call__(self, weights_N: Floats) -> Metrics:
        hits_C = self._sums(self._targets_N, weights_N * self._right_N)
        truth_C, predicted_C = (self._sums(classes, weights_N) for classes in (self._targets_N, self._predicted_N))
        accuracy = _ratio(hits_C.sum(), truth_C.sum())
        return {
            "accuracy": accuracy,
            "balanced_accuracy": _mean(_ratio(hits_C, truth_C)),
            "f1_macro": _mean(_ratio(2 * hits_C, truth_C + predicted_C)),
            "f1_micro": accuracy,
            "mcc": _matthews(hits_C.sum(), truth_C, predicted_C),
            **_means([ranking(weights_N) for ranking in self._rankings]),
            "ece": self._calibration(weights_N),
        }

    def _sums(self, classes_N: NDArray[np.int64], weights_N: Floats) -> NDArray:
        return np.bincount(classes_N, weights_N, minlength=self._num_classes)


class _Labels:
    """Metrics for rows with any number of labels each. NaN in the targets is an unknown label."""

    def __init__(self, probabilities_NC: Floats, targets_NC: Floats) -> None:
        known_NC, truth_NC = np.isfinite(targets_NC), targets_NC == 1
        predicted_NC = predicted_positive(probabilities_NC) & known_NC
        self._known_N = known_NC.any(axis=1)
        self._exact_N = ((predicted_NC == truth_NC) | ~known_NC).all(axis=1) & self._known_N
        self._hits_NC = (predicted_NC & truth_NC).astype(np.float64)
        self._size_NC = predicted_NC.astype(np.float64) + truth_NC
        columns = zip(probabilities_NC.T, truth_NC.T, known_NC.T, strict=True)
        self._rankings = [Ranking(*column) for column in columns if column[1].any()]
        self._calibration = CalibrationError(probabilities_NC, truth_NC, known_NC)
        self._fmax = _Fmax(probabilities_NC, truth_NC, known_NC)

    def __call__(self, weights_N: Floats) -> Metrics:
        hits_C, size_C = weights_N @ self._hits_NC, weights_N @ self._size_NC
        return {
            "accuracy": _ratio(weights_N @ self._exact_N, weights_N @ self._known_N),
            "f1_macro": np.nan_to_num(_ratio(2 * hits_C, size_C)).mean(),  # 0 for an empty label, as in scikit-learn
            "f1_micro": _ratio(2 * hits_C.sum(), size_C.sum()),
            **_means([ranking(weights_N) for ranking in self._rankings]),
            "fmax": self._fmax(weights_N),
            "ece": self._calibration(weights_N),
        }


class CalibrationError:
    """Expected calibration error: gaps between confidence and outcome per bin, weighted by the bins' sizes."""

    def __init__(self, confidences_NC: Floats, outcomes_NC: NDArray[np.bool_], known_NC: NDArray[np.bool_]) -> None:
        edges = np.linspace(0.0, 1.0, CALIBRATION_BINS + 1)
        bins = np.searchsorted(edges, confidences_NC[known_NC], side="right") - 1  # the last bin has exactly 1
        cells = np.nonzero(known_NC)[0] * len(edges) + bins
        # Signed gaps per row and bin, because a bin sums over all rows before the absolute value is taken.
        gaps = np.bincount(cells, (outcomes_NC - confidences_NC)[known_NC], minlength=len(known_NC) * len(edges))
        self._gaps_NB = gaps.reshape(len(known_NC), len(edges))
        self._known_N = known_NC.sum(axis=1)

    def __call__(self, weights_N: Floats) -> float:
        return _ratio(np.abs(weights_N @ self._gaps_NB).sum(), weights_N @ self._known_N)


class _Fmax:
    """Fmax (:mod:`esmeray.common.statistics`) in full evaluation mode, without the records that have no true label.

    Probabilities are compared with the thresholds in single precision, so that 0.29 reaches the threshold 0.29.
    """

    def __init__(self, probabilities_NC: Floats, truth_NC: NDArray[np.bool_], known_NC: NDArray[np.bool_]) -> None:
        reached_NC = np.searchsorted(_THRESHOLDS, probabilities_NC.astype(np.float32), side="right")
        shape = len(probabilities_NC), len(_THRESHOLDS)

        def counts(chosen_NC: NDArray[np.bool_]) -> NDArray:
            return counts_reaching(np.nonzero(chosen_NC)[0], reached_NC[chosen_NC], shape)

        predicted_NT, hits_NT = counts(known_NC), counts(truth_NC)
        size_N1 = truth_NC.sum(axis=1, keepdims=True)
        self._annotated_N = size_N1[:, 0] > 0
        self._covered_NT = ((predicted_NT > 0) & (size_N1 > 0)).astype(np.float64)
        self._precision_NT = ratio(hits_NT, predicted_NT)
        self._recall_NT = ratio(hits_NT, size_N1)

    def __call__(self, weights_N: Floats) -> float:
        annotated = weights_N @ self._annotated_N
        precision_T = ratio(weights_N @ self._precision_NT, weights_N @ self._covered_NT)
        recall_T = ratio(weights_N @ self._recall_NT, annotated)
        return f_measure(precision_T, recall_T).max() if annotated else np.nan


def _matthews(right: float, truth_C: Floats, predicted_C: Floats) -> float:
    """Matthews correlation coefficient (Gorodkin 2004).

    It is 0 if all rows have one class or one predicted class, as in scikit-learn.
    """
    total = truth_C.sum()
    if not total:
        return np.nan
    if min(np.count_nonzero(truth_C), np.count_nonzero(predicted_C)) < 2:
        return 0.0
    # Two roots instead of one root of the product, which overflows or underflows earlier.
    spreads = [total**2 - (counts_C**2).sum() for counts_C in (truth_C, predicted_C)]
    return (right * total - truth_C @ predicted_C) / (np.sqrt(spreads[0]) * np.sqrt(spreads[1]))


def _mid_ranks(ties_N: NDArray[np.intp], weights_N: Floats) -> Floats:
    """Return (N,) mid-ranks: the weight below each value, plus half of the weight at it."""
    at_U = np.bincount(ties_N, weights_N)
    return (np.cumsum(at_U) - at_U / 2)[ties_N]


def _deviations(values_N: Floats, weights_N: Floats) -> Floats:
    """Return (N,) deviations from the weighted mean, exactly 0 if all values with a weight are equal."""
    weighted = values_N[weights_N > 0]
    # Exactly 0, because rounding errors of equal values would give a correlation of noise.
    if weighted.min() == weighted.max():
        return np.zeros_like(values_N)
    deviations_N = values_N - weighted[0]  # avoids cancellation for values far from 0
    return deviations_N - np.average(deviations_N, weights=weights_N)


def _correlation(x_N: Floats, y_N: Floats, weights_N: Floats) -> float:
    """Pearson's coefficient from deviations from the weighted means."""
    spread = np.sqrt(weights_N @ x_N**2) * np.sqrt(weights_N @ y_N**2)
    return np.clip(_ratio((weights_N * x_N) @ y_N, spread), -1.0, 1.0)  # rounding may give 1 + 1e-16


def _ratio(numerator: Floats | float, denominator: Floats | float) -> Any:
    """Quotient; NaN if the denominator is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.equal(denominator, 0), np.nan, np.divide(numerator, denominator))


def _mean(values_C: Floats) -> float:
    defined = values_C[np.isfinite(values_C)]
    return float(defined.mean()) if len(defined) else np.nan


def _means(columns: list[Metrics]) -> Metrics:
    names = columns[0] if columns else ()
    return {name: _mean(np.array([metrics[name] for metrics in columns])) for name in names}
