"""Figures of the same predictions under many weightings at once, which is what resampling records comes to.

A resampling with replacement says no more than how often each record counts. So whatever the weights don't change (the
order of the scores, the bin of a confidence, whether a label is called) is worked out once, and a thousand resamplings
are a few sums over columns of weights. In every figure a record of weight 2 is a record that stands there twice.

In: predictions and targets, then weights (N, S). Out: figures (S,) float64 by name, NaN where undefined.

Shape legend: N rows (records, or residues), C classes, labels or columns, S weightings, K positives, B bins,
H thresholds, U distinct values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from dataset.labels.label_space import called
from train_config.classifier_schema import TargetKind

Floats = NDArray[np.float64]
Figures = dict[str, Floats]
"""Name of a figure -> (S,), NaN where it is undefined."""

CALIBRATION_BINS = 15
"""Of equal width, as in Guo et al. 2017."""
_EDGES = np.linspace(0.0, 1.0, CALIBRATION_BINS + 1)
_THRESHOLDS = np.arange(1, 101, dtype=np.float32) / np.float32(100)
"""Those of CAFA: 0.01 to 1 in steps of 0.01."""
_NOTHING = 1e-12
"""Share of a sum below which a difference of such sums is rounding."""


def weighted_figures(kind: TargetKind, probabilities_NC: Floats, targets: NDArray) -> Callable[[Floats], Figures]:
    """What turns weights (N, S), not negative, into the figures of each weighting.

    Args:
        kind: of the targets.
        probabilities_NC: (N, C) float64 in 0..1; of regression, the predicted numbers, finite.
        targets: (N,) int64 in 0..C-1, every row with a target; or (N, C) with NaN where unknown.
    """
    if kind == "multilabel":
        return _Labels(probabilities_NC, targets)
    if kind == "regression":
        return _Columns(probabilities_NC, targets)
    return _Classes(probabilities_NC, targets, ranked=positive_classes(kind, probabilities_NC.shape[1]))


def positive_classes(kind: TargetKind, num_classes: int) -> range:
    """Classes whose ranking counts: all of them; of two, the second, as the other one is its mirror image."""
    return range(1, 2) if kind == "binary" else range(num_classes)


def figures_of_counts(hits_CS: Floats, truth_CS: Floats, predicted_CS: Floats) -> Figures:
    """Figures that follow from how often each class was right, true and predicted.

    Balanced accuracy is the mean recall of the classes that occur, F1 the mean over the classes that occur or were
    predicted; Matthews' coefficient is that of Gorodkin 2004 for several classes, and 0 where all is predicted, or is,
    one class: as in scikit-learn.
    """
    total_S, right_S = truth_CS.sum(axis=0), hits_CS.sum(axis=0)
    recall_CS = _divided(hits_CS, truth_CS)
    f1_CS = _divided(2 * hits_CS, truth_CS + predicted_CS)
    accuracy_S = _divided(right_S, total_S)
    covariance_S = right_S * total_S - (truth_CS * predicted_CS).sum(axis=0)
    spread_S = np.sqrt(_spread(truth_CS, total_S)) * np.sqrt(_spread(predicted_CS, total_S))
    mcc_S = np.where(spread_S > 0, _divided(covariance_S, spread_S), 0.0)
    return {
        "accuracy": accuracy_S,
        "balanced_accuracy": mean_defined(recall_CS, axis=0),
        "f1_macro": mean_defined(f1_CS, axis=0),
        "f1_micro": accuracy_S,
        "mcc": np.where(total_S > 0, mcc_S, np.nan),
    }


def mean_defined(values: Floats, axis: int) -> Floats:
    """The mean over an axis of what is not NaN; NaN where nothing is left."""
    defined = np.isfinite(values)
    return _divided(np.where(defined, values, 0.0).sum(axis=axis), defined.sum(axis=axis).astype(np.float64))


class Ranking:
    """AUROC and average precision of one class's scores; ties count half in AUROC, and are one step of the precision.

    Both are sums over the positives: of the negatives ranked above each (Mann and Whitney 1947), and of the precision
    at its score.

    Args:
        scores_N: the higher, the likelier.
        positive_N: whether each row is of the class.
        rows_N: where the rows stand among the weights; all of them, in order, if None.
    """

    def __init__(self, scores_N: Floats, positive_N: NDArray[np.bool_], rows_N: NDArray | None = None) -> None:
        order_N = np.argsort(-scores_N, kind="stable")
        ordered_N = scores_N[order_N]
        starts = np.flatnonzero(np.concatenate([[True], ordered_N[1:] != ordered_N[:-1]])[: len(ordered_N)])
        ends = np.append(starts[1:], len(ordered_N))
        places_K = np.flatnonzero(positive_N[order_N])
        tie_K = np.searchsorted(starts, places_K, side="right") - 1
        self._before_K, self._after_K = starts[tie_K], ends[tie_K]
        self._hits_before_K = np.searchsorted(places_K, self._before_K)
        self._hits_after_K = np.searchsorted(places_K, self._after_K)
        rows_N = order_N if rows_N is None else rows_N[order_N]
        self._rows_N = rows_N.astype(np.int32 if len(rows_N) < 2**31 else np.int64)  # of thousands of labels
        self._hit_rows_K = self._rows_N[places_K]

    def __call__(self, weights_NS: Floats) -> tuple[Floats, Floats]:
        """(S,) AUROC and (S,) average precision; NaN without a positive, and AUROC also without a negative."""
        weights_KS = weights_NS[self._hit_rows_K]
        total, hits = _running(weights_NS[self._rows_N]), _running(weights_KS)
        positives_S, negatives_S = hits[-1], total[-1] - hits[-1]
        hits_after_KS, total_after_KS = hits[self._hits_after_K], total[self._after_K]
        above_KS = total[self._before_K] - hits[self._hits_before_K] + total_after_KS - hits_after_KS
        pairs_S = positives_S * np.where(negatives_S > _NOTHING * total[-1], negatives_S, 0.0)
        auroc_S = 1 - _divided(np.einsum("ks,ks->s", weights_KS, above_KS) / 2, pairs_S)
        precision_KS = hits_after_KS / np.maximum(total_after_KS, np.finfo(np.float64).tiny)
        return auroc_S, _divided(np.einsum("ks,ks->s", weights_KS, precision_KS), positives_S)


class Calibration:
    """Expected calibration error: the gap between confidence and outcome in each bin, by its share of the outcomes.

    Args:
        confidences_NC: each in 0..1.
        outcomes_NC: whether what was predicted with that confidence is so.
        known_NC: which of them count.
    """

    def __init__(self, confidences_NC: Floats, outcomes_NC: NDArray[np.bool_], known_NC: NDArray[np.bool_]) -> None:
        bins = len(_EDGES)  # the last holds confidences of exactly 1
        rows, _ = np.nonzero(known_NC)
        confidences, outcomes = confidences_NC[known_NC], outcomes_NC[known_NC]
        places = rows * bins + np.searchsorted(_EDGES, confidences, side="right") - 1
        gaps = np.bincount(places, weights=outcomes - confidences, minlength=len(known_NC) * bins)
        self._gaps_NB = gaps.reshape(len(known_NC), bins)
        self._known_N = known_NC.sum(axis=1).astype(np.float64)

    def __call__(self, weights_NS: Floats) -> Floats:
        """(S,) the error."""
        return _divided(np.abs(self._gaps_NB.T @ weights_NS).sum(axis=0), self._known_N @ weights_NS)


class ProteinCentric:
    """Fmax as CAFA has it (Radivojac et al. 2013, equations 1 to 3, in full evaluation).

    At each threshold, precision is the mean over the records with at least one prediction, recall the mean over all
    records; F is their harmonic mean, and Fmax the highest F. Records without a true label are no part of it.

    Args:
        probabilities_NC: compared with the thresholds in single precision, so that 0.29 is not below 0.29.
        truth_NC: whether each record has each label; False where unknown.
        known_NC: labels that count.
    """

    def __init__(self, probabilities_NC: Floats, truth_NC: NDArray[np.bool_], known_NC: NDArray[np.bool_]) -> None:
        shape_NH = (len(truth_NC), len(_THRESHOLDS))
        passed_NC = np.searchsorted(_THRESHOLDS, probabilities_NC.astype(np.float32), side="right")
        predicted_NH = _counts_from(np.where(known_NC, passed_NC, 0), shape_NH)
        hits_NH = _counts_from(np.where(truth_NC, passed_NC, 0), shape_NH)
        size_N = truth_NC.sum(axis=1)
        self._annotated_N = (size_N > 0).astype(np.float64)
        self._covered_NH = (predicted_NH > 0) * self._annotated_N[:, None]
        self._precision_NH = hits_NH / np.maximum(predicted_NH, 1) * self._annotated_N[:, None]
        self._recall_NH = hits_NH / np.maximum(size_N, 1)[:, None]

    def __call__(self, weights_NS: Floats) -> Floats:
        """(S,) Fmax; NaN where no record has a label."""
        precision_HS = _divided(self._precision_NH.T @ weights_NS, self._covered_NH.T @ weights_NS)
        annotated_S = self._annotated_N @ weights_NS
        recall_HS = _divided(self._recall_NH.T @ weights_NS, annotated_S[None, :])
        f_HS = _divided(2 * precision_HS * recall_HS, precision_HS + recall_HS)
        return np.where(annotated_S > 0, np.where(np.isfinite(f_HS), f_HS, 0.0).max(axis=0), np.nan)


class Correlation:
    """Errors and correlations of one column of numbers.

    R² is 1 - residual sum of squares / total sum of squares, Spearman's coefficient is Pearson's of the mid-ranks.
    All but the errors are undefined where the target does not vary, the correlations where the prediction does not.

    Args:
        predicted_N: finite numbers.
        measured_N: finite numbers.
    """

    def __init__(self, predicted_N: Floats, measured_N: Floats) -> None:
        self._errors_N = predicted_N - measured_N
        # Medians keep what is constant exactly 0, and sums of squares of what is far from 0 exact.
        self._predicted_N = predicted_N - np.median(predicted_N)
        self._measured_N = measured_N - np.median(measured_N)
        self._predicted_ranks, self._measured_ranks = MidRanks(predicted_N), MidRanks(measured_N)

    def __call__(self, weights_NS: Floats) -> Figures:
        """mse, mae, r2, pearson and spearman, each (S,)."""
        total_S = weights_NS.sum(axis=0)
        squares_S = self._errors_N**2 @ weights_NS
        x_N, y_N = self._predicted_N, self._measured_N
        variation_x_S, variation_y_S = _variation(x_N, x_N, weights_NS), _variation(y_N, y_N, weights_NS)
        a_NS, b_NS = self._predicted_ranks(weights_NS), self._measured_ranks(weights_NS)
        pairs = ((a_NS, b_NS), (a_NS, a_NS), (b_NS, b_NS))
        ranked = (np.einsum("ns,ns,ns->s", weights_NS, left, right) for left, right in pairs)
        covariance_S, variation_a_S, variation_b_S = ranked
        return {
            "mse": _divided(squares_S, total_S),
            "mae": _divided(np.abs(self._errors_N) @ weights_NS, total_S),
            "r2": 1 - _divided(squares_S, variation_y_S),
            "pearson": _correlation(_variation(x_N, y_N, weights_NS), variation_x_S, variation_y_S),
            "spearman": _correlation(covariance_S, variation_a_S, variation_b_S),
        }


class MidRanks:
    """Ranks less their mean, equal values sharing the middle of theirs.

    Args:
        values_N: numbers.
    """

    def __init__(self, values_N: Floats) -> None:
        distinct_U, self._distinct_N = np.unique(values_N, return_inverse=True)
        self._sums = GroupSums(self._distinct_N, len(distinct_U))

    def __call__(self, weights_NS: Floats) -> Floats:
        """(N, S) the weight below each value and half of that at it, less half of all."""
        at_US = self._sums(weights_NS)
        through_US = np.cumsum(at_US, axis=0)
        return (through_US - at_US / 2 - through_US[-1:] / 2)[self._distinct_N]


class GroupSums:
    """Sums of weights by group.

    Args:
        groups_N: group of each row, in 0..num_groups-1.
        num_groups: rows of the result.
    """

    def __init__(self, groups_N: NDArray[np.integer], num_groups: int) -> None:
        self._num_groups = num_groups
        self._order_N = np.argsort(groups_N, kind="stable")
        self._present, self._starts = np.unique(groups_N[self._order_N], return_index=True)

    def __call__(self, weights_NS: Floats) -> Floats:
        """(num_groups, S)."""
        sums = np.zeros((self._num_groups, weights_NS.shape[1]))
        sums[self._present] = np.add.reduceat(weights_NS[self._order_N], self._starts, axis=0)
        return sums


class _Classes:
    """Figures of one class of several for each row."""

    def __init__(self, probabilities_NC: Floats, targets_N: NDArray[np.int64], ranked: Iterable[int]) -> None:
        num_classes = probabilities_NC.shape[1]
        predicted_N = probabilities_NC.argmax(axis=1)
        self._correct_N = predicted_N == targets_N
        self._by_truth, self._by_prediction = (GroupSums(rows, num_classes) for rows in (targets_N, predicted_N))
        self._rankings = [Ranking(probabilities_NC[:, c], targets_N == c) for c in ranked if (targets_N == c).any()]
        confidences_N1 = probabilities_NC.max(axis=1, keepdims=True)
        correct_N1 = self._correct_N[:, None]
        self._calibration = Calibration(confidences_N1, correct_N1, np.ones_like(correct_N1))

    def __call__(self, weights_NS: Floats) -> Figures:
        hits_CS = self._by_truth(weights_NS * self._correct_N[:, None])
        counted = figures_of_counts(hits_CS, self._by_truth(weights_NS), self._by_prediction(weights_NS))
        return {**counted, **_mean_rankings(self._rankings, weights_NS), "ece": self._calibration(weights_NS)}


class _Labels:
    """Figures of any number of labels for each row; NaN among the targets is a label that nobody looked at."""

    def __init__(self, probabilities_NC: Floats, targets_NC: Floats) -> None:
        known_NC, truth_NC = np.isfinite(targets_NC), targets_NC == 1
        predicted_NC = called(probabilities_NC) & known_NC
        self._looked_at_N = known_NC.any(axis=1).astype(np.float64)
        self._exact_N = ((predicted_NC == truth_NC) | ~known_NC).all(axis=1) * self._looked_at_N
        self._hits_NC, self._size_NC = (
            counts.astype(np.float64) for counts in (predicted_NC & truth_NC, predicted_NC.astype(np.int8) + truth_NC)
        )
        columns = zip(probabilities_NC.T, truth_NC.T, known_NC.T, strict=True)
        self._rankings = [
            Ranking(scores[known], truth[known], np.flatnonzero(known))
            for scores, truth, known in columns
            if truth.any()
        ]
        self._calibration = Calibration(probabilities_NC, truth_NC, known_NC)
        self._protein_centric = ProteinCentric(probabilities_NC, truth_NC, known_NC)

    def __call__(self, weights_NS: Floats) -> Figures:
        hits_CS, size_CS = self._hits_NC.T @ weights_NS, self._size_NC.T @ weights_NS
        f1_CS = np.where(size_CS > 0, _divided(2 * hits_CS, size_CS), 0.0)  # as scikit-learn has it
        return {
            "accuracy": _divided(self._exact_N @ weights_NS, self._looked_at_N @ weights_NS),
            "f1_macro": f1_CS.mean(axis=0),
            "f1_micro": _divided(2 * hits_CS.sum(axis=0), size_CS.sum(axis=0)),
            **_mean_rankings(self._rankings, weights_NS),
            "fmax": self._protein_centric(weights_NS),
            "ece": self._calibration(weights_NS),
        }


class _Columns:
    """Figures of numbers, each the mean over the columns that have it; NaN among the targets is not measured."""

    def __init__(self, predicted_NC: Floats, measured_NC: Floats) -> None:
        known_NC = np.isfinite(measured_NC)
        self._columns = [
            (known, Correlation(predicted[known], measured[known]))
            for predicted, measured, known in zip(predicted_NC.T, measured_NC.T, known_NC.T, strict=True)
            if known.any()
        ]

    def __call__(self, weights_NS: Floats) -> Figures:
        columns = [correlation(weights_NS[known]) for known, correlation in self._columns]
        return {name: mean_defined(np.stack([column[name] for column in columns]), axis=0) for name in columns[0]}


def _mean_rankings(rankings: list[Ranking], weights_NS: Floats) -> Figures:
    if not rankings:
        return {}
    auroc_CS, precision_CS = (np.stack(rows) for rows in zip(*(rank(weights_NS) for rank in rankings), strict=True))
    return {"auroc": mean_defined(auroc_CS, axis=0), "average_precision": mean_defined(precision_CS, axis=0)}


def _counts_from(passed_NC: NDArray[np.integer], shape_NH: tuple[int, int]) -> NDArray[np.int64]:
    """(N, H): how many entries of each row passed at least thresholds 1..H, from how many thresholds each passed."""
    num_rows, num_thresholds = shape_NH
    bins = num_thresholds + 1
    places = np.arange(num_rows)[:, None] * bins + passed_NC
    counts = np.bincount(places.ravel(), minlength=num_rows * bins).reshape(num_rows, bins)
    return np.cumsum(counts[:, ::-1], axis=1)[:, -2::-1]


def _running(values: Floats) -> Floats:
    """(n + 1, S): the sum of the rows before each place."""
    sums = np.zeros((len(values) + 1, values.shape[1]))
    np.cumsum(values, axis=0, out=sums[1:])
    return sums


def _spread(counts_CS: Floats, total_S: Floats) -> Floats:
    """(S,) total² - the sum of the squares; exactly 0 where all is in one class."""
    spread_S = total_S**2 - (counts_CS**2).sum(axis=0)
    return np.where(spread_S > _NOTHING * total_S**2, spread_S, 0.0)


def _variation(x_N: Floats, y_N: Floats, weights_NS: Floats) -> Floats:
    """(S,) sum of the products of the deviations from the weighted means; 0 where it is lost in rounding."""
    products_S = (x_N * y_N) @ weights_NS
    variation_S = products_S - _divided((x_N @ weights_NS) * (y_N @ weights_NS), weights_NS.sum(axis=0))
    if x_N is y_N:
        return np.where(variation_S > _NOTHING * products_S, variation_S, 0.0)
    return variation_S


def _correlation(covariance_S: Floats, variation_x_S: Floats, variation_y_S: Floats) -> Floats:
    return np.clip(_divided(covariance_S, np.sqrt(variation_x_S) * np.sqrt(variation_y_S)), -1.0, 1.0)


def _divided(numerator: Floats, denominator: Floats) -> Floats:
    """The quotient; NaN where the denominator is 0."""
    numerator, denominator = np.broadcast_arrays(numerator, denominator)
    return np.divide(numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator != 0)
