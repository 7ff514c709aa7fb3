"""Metrics of ranked hits with nested labels: sensitivity up to the first false positive, AUC, and top hits.

At level l a hit is a relative if it shares the query's group at this level and at no closer one. It is foreign if it
does not even share the group of the last level. Superfamilies are therefore judged without members of the query's own
family, and a hit of the same fold does not end a list (as in the scripts of progres, Greener and Jamali 2025,
scripts/other_methods).

Shape legend: N proteins, K hits of a query, L levels, Q queries, M metrics.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esmeray.common.statistics import percentile_interval, ratio, resamplings
from esmeray.common.text import counted
from esmeray.dataset.embeddings.manifest import training_hashes

METRICS = ("sensitivity", "sensitivity_of_others", "auc", "top_1", "top_5")
"""Columns of :func:`query_metrics`."""


def in_training(folder: Path, sequences_n2: NDArray[np.uint64], kind: str = "") -> tuple[NDArray[np.bool_] | None, str]:
    """(n,) true for sequences in the training of the model, None if not recorded; and a text.

    ``folder``: embeddings or an index.
    """
    training = training_hashes(folder)
    if training is None:
        return None, "proteins in the model's training data: not recorded"
    trained_n = np.isin(sequences_n2[:, 0], training)
    return trained_n, (
        f"{np.count_nonzero(trained_n):,} of {counted(len(trained_n), f'{kind}protein{{s}}')} were in the "
        f"training data of the fitted model ({counted(len(training), 'protein{s}')})"
    )


def query_metrics(groups_NL: NDArray[np.int64], query: int, hits_K: NDArray[np.int64]) -> NDArray[np.float64]:
    """(L, M) metrics of one query.

    NaN if the query has no relative of the level, and for top hits if it has none up to the level.

    ``groups_NL``: negative for proteins without a label, which are ignored. ``hits_K``: proteins in ranked order; the
    list may be incomplete. The query itself counts as the first hit of the sensitivity at level 0, as in published
    values. Elsewhere it is ignored.
    """
    levels = groups_NL.shape[1]
    is_counted_N = groups_NL[:, 0] >= 0
    is_counted_N[query] = False
    # The closest level that each protein shares with the query, or L for a foreign one.
    is_shared_NL = (groups_NL == groups_NL[query]) & (groups_NL[query] >= 0)
    closest_N = np.where(is_shared_NL.any(1), is_shared_NL.argmax(1), levels)
    closest_K = closest_N[hits_K[is_counted_N[hits_K]]]
    *relatives_L, foreign = np.bincount(closest_N[is_counted_N], minlength=levels + 1).tolist()
    is_foreign_K = closest_K == levels
    rows = []
    for level, relatives in enumerate(relatives_L):
        foreign_before = is_foreign_K.cumsum()[closest_K == level]
        before_foreign = np.count_nonzero(foreign_before == 0)
        # Unlisted proteins are ranked last with equal scores: half of their pairs are in the right order.
        unlisted = (relatives - len(foreign_before)) * (foreign - np.count_nonzero(is_foreign_K)) / 2
        in_order = (foreign - foreign_before).sum() + unlisted
        itself = int(level == 0)
        is_near_K = closest_K <= level
        near = min(1, sum(relatives_L[: level + 1]))
        parts = [before_foreign + itself, before_foreign, in_order, is_near_K[:1].any(), is_near_K[:5].any()]
        wholes = [relatives + itself, relatives, relatives * foreign, near, near]
        rows.append(np.where(np.array(wholes) > 0, ratio(parts, np.array(wholes)), np.nan))
    return np.array(rows)


def means(values: Iterable[NDArray[np.float64]], samples: int, seed: int) -> list[dict[str, dict[str, Any]]]:
    """Mean metrics per level: ``value`` over the ``queries`` that have one, and its bootstrap ``interval``.

    ``values``: (L, M) per query. ``samples``: number of resamplings of the queries.
    """
    values_QLM = np.array(list(values))
    # The first row is the original sample.
    counts_SQ = np.array([np.ones(len(values_QLM)), *resamplings(len(values_QLM), samples, seed)])
    known_SLM = np.tensordot(counts_SQ, ~np.isnan(values_QLM), 1)
    sums_SLM = np.tensordot(counts_SQ, np.nan_to_num(values_QLM), 1)
    # NaN if a resampling has no query with such a relative.
    means_SLM = np.where(known_SLM > 0, ratio(sums_SLM, known_SLM), np.nan)
    return [
        dict(zip(METRICS, map(_metric, means_SLM[:, level].T, known_SLM[0, level]), strict=True))
        for level in range(means_SLM.shape[1])
    ]


def _metric(means_S: NDArray[np.float64], queries: float) -> dict[str, Any]:
    return {"value": float(means_S[0]), "interval": percentile_interval(means_S[1:]), "queries": int(queries)}
