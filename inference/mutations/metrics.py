"""Metrics of scores beside measured values, as ProteinGym defines them (Notin et al. 2023), and their intervals.

    spearman       rank correlation
    top_10_recall  share of the mutants in the top 10 % of measured values that are in the top 10 % of scores
    ndcg           of the top 10 % of scores; gains are measured values, scaled to 0 to 1
    auroc          of the mutants whose measured value is at least the median
    mcc            of these, predicted by scores of at least their median

Shape legend: N mutants.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.common.statistics import SHARE, percentile_interval, resamplings
from esmeray.model.metrics.weighted import Correlation, Floats, Metrics, Ranking

TOP_SHARE = 0.1


def mutation_metrics(scores_N: Floats, measured_N: Floats) -> Callable[[NDArray[np.int64]], Metrics]:
    """Return the function from how often each mutant counts to the metrics, NaN where undefined."""
    # Medians of all mutants, not of a resampling's: what counts as good is a property of the measurement. Sorted once
    # here, as thousands of resamplings follow.
    good_N = measured_N >= np.median(measured_N)
    predicted_N = scores_N >= np.median(scores_N)
    correlation = Correlation(scores_N, measured_N)
    ranking = Ranking(scores_N, good_N, np.ones_like(good_N))

    def metrics(counts_N: NDArray[np.int64]) -> Metrics:
        weights_N = counts_N.astype(np.float64)
        drawn = np.repeat(np.arange(len(counts_N)), counts_N)
        return {
            "spearman": correlation(weights_N)["spearman"],
            "top_10_recall": _top_recall(scores_N[drawn], measured_N[drawn]),
            "ndcg": _ndcg(scores_N[drawn], measured_N[drawn]),
            "auroc": ranking(weights_N)["auroc"],
            "mcc": _mcc(predicted_N[drawn], good_N[drawn]),
        }

    return metrics


def evaluation_of(scores: Mapping[str, Floats], measured_N: Floats, *, samples: int, seed: int = 0) -> dict[str, Any]:
    """Metrics and intervals of the first scores, and of others as baselines, of the mutants that have all of them.

    As :func:`esmeray.inference.classify.report.metrics_lines` reads it. NaN is missing. Raises DataError where none has
    all.
    """
    # Of the mutants that have all: metrics of two scores compare on the same mutants alone.
    known_N = np.logical_and.reduce([np.isfinite(values) for values in (*scores.values(), measured_N)])
    size = int(known_N.sum())
    if not size:
        raise DataError("no mutant has a measured value and every score; nothing can be evaluated")

    def evaluated(scores_N: Floats) -> dict[str, Any]:
        metrics = mutation_metrics(scores_N[known_N], measured_N[known_N])
        values = metrics(np.ones(size, dtype=np.int64))
        resampled = [metrics(counts_N) for counts_N in resamplings(size, samples, seed)]
        intervals = {name: percentile_interval([drawn[name] for drawn in resampled]) for name in values}
        return {
            # JSON has no NaN: what is undefined is left out.
            "metrics": {name: float(value) for name, value in values.items() if np.isfinite(value)},
            "intervals": {name: interval for name, interval in intervals.items() if interval},
        }

    (_, first), *others = ((name, evaluated(values)) for name, values in scores.items())
    return {
        **first,
        "baselines": dict(others),
        "records": len(known_N),
        "without_target": len(known_N) - size,
        "bootstrap": {"samples": samples, "seed": seed, "share": SHARE},
    }


def _mcc(predicted_N: NDArray[np.bool_], good_N: NDArray[np.bool_]) -> float:
    """Matthews' correlation from counts, of which the product has no bound as Python's integers."""
    size, predicted, good = len(good_N), int(predicted_N.sum()), int(good_N.sum())
    spread = (predicted * (size - predicted) * good * (size - good)) ** 0.5
    return (size * int((predicted_N & good_N).sum()) - predicted * good) / spread if spread else np.nan


def _top_recall(scores_N: Floats, measured_N: Floats) -> float:
    top, predicted = (values >= np.quantile(values, 1 - TOP_SHARE) for values in (measured_N, scores_N))
    return float((top & predicted).sum() / top.sum())


def _ndcg(scores_N: Floats, measured_N: Floats) -> float:
    number = int(len(scores_N) * TOP_SHARE)
    spread = np.ptp(measured_N)
    if not number or not spread:
        return np.nan
    gains_N = (measured_N - measured_N.min()) / spread
    discounts = 1 / np.log2(np.arange(2, number + 2))
    # Stable: equal scores keep the table's order, so that the value is the same on any machine.
    best = np.argsort(-scores_N, kind="stable")[:number]
    return float(gains_N[best] @ discounts / (np.sort(gains_N)[::-1][:number] @ discounts))
