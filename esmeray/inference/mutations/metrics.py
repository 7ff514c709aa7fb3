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
    classes = Correlation(predicted_N.astype(float), good_N.astype(float))
    ranking = Ranking(scores_N, good_N, np.ones_like(good_N))

    def metrics(counts_N: NDArray[np.int64]) -> Metrics:
        weights_N = counts_N.astype(np.float64)
        drawn = np.repeat(np.arange(len(scores_N)), counts_N)
        return {
            "spearman": correlation(weights_N)["spearman"],
            "top_10_recall": _top_recall(scores_N[drawn], measured_N[drawn]),
            "ndcg": _ndcg(scores_N[drawn], measured_N[drawn]),
            "auroc": ranking(weights_N)["auroc"],
            # Matthews correlation coefficient: Pearson's coefficient of two columns of 0 and 1.
            "mcc": classes(weights_N)["pearson"],
        }

    return metrics


def evaluation_of(scores: Mapping[str, Floats], measured_N: Floats, *, samples: int, seed: int = 0) -> dict[str, Any]:
    """Evaluate the first scores, with the others as baselines, on the mutants that have all of them.

    The result is the input of :func:`esmeray.inference.classify.report.metrics_lines`. NaN means missing. Raises
    DataError if no mutant has all values.
    """
    # Restricted to mutants with all values, because metrics are comparable only on the same mutants.
    known_N = np.logical_and.reduce(np.isfinite([*scores.values(), measured_N]))
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

    first, *others = scores
    return {
        **evaluated(scores[first]),
        "baselines": {name: evaluated(scores[name]) for name in others},
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
        others = {f"spearman of {other}": baseline["metrics"].get("spearman") for other, baseline in baselines}
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
    texts = table.map("{:.3f}".format).mask(table.isna(), "–")
    texts["mutants"] = table["mutants"].map("{:,.0f}".format)
    rows = [[str(name), *cells] for name, *cells in texts.itertuples(name=None)]
    return [*table_lines(["protein", *texts.columns], rows), ""]


def _top_recall(scores_N: Floats, measured_N: Floats) -> float:
    top_N = measured_N >= np.quantile(measured_N, 1 - TOP_SHARE)
    predicted_N = scores_N >= np.quantile(scores_N, 1 - TOP_SHARE)
    return float((top_N & predicted_N).sum() / top_N.sum())


def _ndcg(scores_N: Floats, measured_N: Floats) -> float:
    number = int(len(measured_N) * TOP_SHARE)
    spread = np.ptp(measured_N)
    if not number or not spread:
        return np.nan
    gains_N = (measured_N - measured_N.min()) / spread
    discounts = 1 / np.log2(np.arange(2, number + 2))
    # Stable: ties keep the table's order, so that results are the same on any machine.
    ranked = np.argsort(-scores_N, kind="stable")[:number]
    return float(gains_N[ranked] @ discounts / (np.sort(gains_N)[::-1][:number] @ discounts))
