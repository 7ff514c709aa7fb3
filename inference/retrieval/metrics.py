"""Metrics of ranked hits by nested labels: sensitivity up to the first false positive, AUC, and the first hits.

At level l a hit is a relative if it shares the query's group there and no closer one; it is foreign if it shares not
even the group of the last level. So superfamilies are judged without the members of the query's own family, and a hit
of the same fold ends no list (the scripts of progres, Greener and Jamali 2025, scripts/other_methods).

Shape legend: N proteins, K hits of a query, L levels, Q queries.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esmeray.common.statistics import percentile_interval, resamplings

_FIRST = (1, 5)
"""Hits of which one has to share the group."""


class Metric(NamedTuple):
    """A mean over queries, the interval of its bootstrap, and how many queries it is of."""

    value: float
    interval: tuple[float, float] | None
    queries: int


def query_metrics(groups_NL: NDArray[np.int64], query: int, hits_K: NDArray[np.int64]) -> list[list[float]]:
    """Of each level: sensitivity, the same of others, AUC, top 1 and top 5; NaN where the query has no such relative.

    ``hits_K``: proteins in the order of the list, which need not have all. The query itself counts as the first hit of
    the sensitivity at level 0, as the published values have it, and nowhere else.
    """
    hits_K = hits_K[hits_K != query]
    levels = groups_NL.shape[1]
    # The closest level that each protein shares with the query, L for a foreign one.
    is_shared_NL = (groups_NL == groups_NL[query]) & (groups_NL[query] >= 0)
    closest_N = np.where(is_shared_NL.any(1), is_shared_NL.argmax(1), levels)
    closest_K = closest_N[hits_K]
    closest_N = np.delete(closest_N, query)
    foreign = int((closest_N == levels).sum())
    foreign_before_K = (closest_K == levels).cumsum()
    rows = []
    for level in range(levels):
        relatives = int((closest_N == level).sum())
        is_relative_K = closest_K == level
        found = int((is_relative_K & (foreign_before_K == 0)).sum())
        itself = int(level == 0)
        # What the list lacks comes after it, all at one place: half of its pairs are in the right order.
        unlisted = (relatives - int(is_relative_K.sum())) * (foreign - int(foreign_before_K[-1:].sum())) / 2
        in_order = (foreign - foreign_before_K[is_relative_K]).sum() + unlisted
        near = (closest_N <= level).any()
        first = [float((closest_K[:count] <= level).any()) if near else np.nan for count in _FIRST]
        rows.append(
            [
                _share(found + itself, relatives + itself),
                _share(found, relatives),
                _share(in_order, relatives * foreign),
                *first,
            ]
        )
    return rows


NAMES = ("sensitivity", "sensitivity_of_others", "auc", *(f"top_{count}" for count in _FIRST))
"""Of the columns of :func:`query_metrics`."""


def _share(part: float, whole: float) -> float:
    return part / whole if whole else np.nan


def means(rows: Iterable[list[list[float]]], samples: int, seed: int) -> list[dict[str, Metric]]:
    """Of each level the metrics by name, with intervals of so many resamplings of the queries."""
    values_QLM = np.array(list(rows))
    known_QLM = ~np.isnan(values_QLM)
    filled_QLM = np.where(known_QLM, values_QLM, 0.0)
    resampled = []
    for counts_Q in resamplings(len(values_QLM), samples, seed):
        known_LM = np.tensordot(counts_Q, known_QLM, 1)
        # NaN where a resampling has no query with such a relative.
        resampled.append(np.where(known_LM, np.tensordot(counts_Q, filled_QLM, 1), np.nan) / np.maximum(known_LM, 1))
    resampled_SLM = np.array(resampled)
    return [
        {
            name: Metric(
                float(_share(filled_QLM[:, level, column].sum(), known_QLM[:, level, column].sum())),
                percentile_interval(resampled_SLM[:, level, column]),
                int(known_QLM[:, level, column].sum()),
            )
            for column, name in enumerate(NAMES)
        }
        for level in range(values_QLM.shape[1])
    ]
