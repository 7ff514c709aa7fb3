"""Metrics of scores against measured values, as in ProteinGym (Notin et al. 2023), with intervals.

    spearman       rank correlation
    top_10_recall  share of the mutants in the top 10 % of measured values that are in the top 10 % of scores
    ndcg           NDCG of the top 10 % of scores; gains are measured values, scaled to 0 to 1
    auroc          AUROC for mutants whose measured value is at least the median
    mcc            MCC for the same mutants, predicted by scores of at least their median

Shape legend: N mutants.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.common.statistics import SHARE, percentile_interval, resamplings
from esmeray.inference.classify.report import metrics_lines, table_lines
from esmeray.model.metrics.weighted import Correlation, Floats, Metrics, Ranking

TOP_SHARE = 0.1


def mutation_metrics(scores_N: Floats, measured_N: Floats) -> Callable[[NDArray[np.int64]], Metrics]:
    """Return a function from the number of times that each mutant counts to the metrics; NaN if undefined."""
    # Medians over all mutants instead of a resampling, because the threshold is a property of the measurement.
    good_N = measured_N >= np.median(measured_N)
    predicted_N = scores_N >= np.median(scores_N)
    correlation = Correlation(scores_N, measured_N)
    ranking = Ranking(scores_N, good_N, np.ones_like(good_N))
    # Sorted once, because thousands of resamplings follow, and a resampling in this order is sorted. The sort is
    # stable: ties keep the table's order, so that results are the same on any machine.
    by_score_N, by_measured_N = (np.argsort(-values, kind="stable") for values in (scores_N, measured_N))

    def metrics(counts_N: NDArray[np.int64]) -> Metrics:
        weights_N = counts_N.astype(np.float64)
        best, measured_best = (np.repeat(order_N, counts_N[order_N]) for order_N in (by_score_N, by_measured_N))
        return {
            "spearman": correlation(weights_N)["spearman"],
            "top_10_recall": _top_recall(scores_N[best], measured_N[best], measured_N[measured_best]),
            "ndcg": _ndcg(measured_N[best], measured_N[measured_best]),
            "auroc": ranking(weights_N)["auroc"],
            "mcc": _mcc(predicted_N, good_N, counts_N),
        }

    return metrics


def evaluation_of(scores: Mapping[str, Floats], measured_N: Floats, *, samples: int, seed: int = 0) -> dict[str, Any]:
    """Evaluate the first scores, with the others as baselines, on the mutants that have all of them.

    The result is the input of :func:`esmeray.inference.classify.report.metrics_lines`. NaN means missing. Raises
    DataError if no mutant has all values.
    """
    # Restricted to mutants with all values, because metrics are comparable only on the same mutants.
    known_N = np.logical_and.reduce([np.isfinite(values) for values in (*scores.values(), measured_N)])
    size = int(known_N.sum())
    if not size:
        raise DataError("no mutant has both a measured value and all scores, so nothing can be evaluated")

    def evaluated(scores_N: Floats) -> dict[str, Any]:
        metrics = mutation_metrics(scores_N[known_N], measured_N[known_N])
        values = metrics(np.ones(size, dtype=np.int64))
        resampled = [metrics(counts_N) for counts_N in resamplings(size, samples, seed)]
        intervals = {name: percentile_interval([drawn[name] for drawn in resampled]) for name in values}
        return {
            # JSON has no NaN, so undefined metrics are left out.
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


def evaluations_of(
    scores: Mapping[str, Floats], measured_N: Floats, proteins: Sequence[str], *, samples: int
) -> dict[str, dict[str, Any]]:
    """:func:`evaluation_of` by protein; ``proteins`` holds the protein name of each mutant."""
    names_N = np.array(proteins)
    rows = {name: names_N == name for name in dict.fromkeys(names_N.tolist())}
    return {
        name: evaluation_of({key: values[own_N] for key, values in scores.items()}, measured_N[own_N], samples=samples)
        for name, own_N in rows.items()
    }


def metrics_table(by_protein: Mapping[str, dict[str, Any]]) -> pd.DataFrame:
    """Table of metrics, one row per protein, with Spearman's coefficient of each baseline."""
    rows = {}
    for name, evaluation in by_protein.items():
        baselines = evaluation["baselines"].items()
        others = {f"spearman of {other}": found["metrics"].get("spearman") for other, found in baselines}
        size = evaluation["records"] - evaluation["without_target"]
        rows[name] = {"mutants": size, "spearman": evaluation["metrics"].get("spearman"), **others}
        rows[name] |= evaluation["metrics"]
    return pd.DataFrame.from_dict(rows, orient="index").astype(float)


def summary_lines(by_protein: Mapping[str, dict[str, Any]]) -> list[str]:
    """Report of one protein, or a table of several proteins with their mean."""
    if len(by_protein) == 1:
        return metrics_lines(next(iter(by_protein.values())))
    table = metrics_table(by_protein)
    table.loc["mean"] = table.mean()
    sizes = table.pop("mutants")
    rows = [
        [str(name), f"{size:,.0f}", *("–" if np.isnan(value) else f"{value:.3f}" for value in row)]
        for name, size, row in zip(table.index, sizes, table.to_numpy().tolist(), strict=True)
    ]
    return [*table_lines(["protein", "mutants", *table.columns], rows), ""]


def _mcc(predicted_N: NDArray[np.bool_], good_N: NDArray[np.bool_], counts_N: NDArray[np.int64]) -> float:
    """Matthews correlation coefficient from counts, as Python integers to avoid overflow of their product."""
    size, predicted, good = (int(counts_N @ chosen_N) for chosen_N in (np.ones_like(good_N), predicted_N, good_N))
    spread = (predicted * (size - predicted) * good * (size - good)) ** 0.5
    return (size * int(counts_N @ (predicted_N & good_N)) - predicted * good) / spread if spread else np.nan


def _top_recall(scores_N: Floats, measured_N: Floats, sorted_N: Floats) -> float:
    """``scores_N`` are in descending order, and ``sorted_N`` are the measured values in descending order."""
    top = measured_N >= _falling_quantile(sorted_N, TOP_SHARE)
    return float((top & (scores_N >= _falling_quantile(scores_N, TOP_SHARE))).sum() / top.sum())


def _falling_quantile(values_N: Floats, share: float) -> float:
    """Upper quantile of values in descending order, interpolated as in np.quantile."""
    rank = share * (len(values_N) - 1)
    below = int(np.ceil(rank))
    return float(np.interp(rank, [below - 1, below], [values_N[max(0, below - 1)], values_N[below]]))


def _ndcg(measured_N: Floats, sorted_N: Floats) -> float:
    """``measured_N`` are in descending order of score; ``sorted_N`` are the measured values in descending order."""
    number = int(len(measured_N) * TOP_SHARE)
    spread = sorted_N[0] - sorted_N[-1]
    if not number or not spread:
        return np.nan
    gains, best_gains = ((values_N[:number] - sorted_N[-1]) / spread for values_N in (measured_N, sorted_N))
    discounts = 1 / np.log2(np.arange(2, number + 2))
    return float(gains @ discounts / (best_gains @ discounts))
