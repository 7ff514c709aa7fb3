"""Score thresholds that bound the share of false hits, calibrated with queries whose relatives are known.

Conformal risk control (Angelopoulos et al. 2024, "Conformal risk control", theorem 1; for proteins: Boger et al. 2025,
"Functional protein mining with conformal guarantees"). Consider a query that is exchangeable with the n calibrating
queries. Its expected share of false hits is at most ``error_rate`` if the mean share of the calibrating queries, plus
one query with false hits only, is at most ``error_rate``.

The theorem requires a share that is monotone in the threshold, which it is not. The largest share at this threshold or
any above replaces it: the bound holds, with fewer hits.

Larger scores are nearer. Shape legend: n calibrating queries, K hits of a query.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.common.text import counted
from esmeray.dataset.identifiers import match_ids
from esmeray.dataset.targets import level_ids
from esmeray.inference.index.index import Index
from esmeray.inference.index.metric import MetricName
from esmeray.inference.retrieval.metrics import in_training

Scores = TypeVar("Scores", float, NDArray[np.floating])


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration.

    Attributes:
        threshold: lowest score of a hit; infinite if no threshold keeps the error rate.
        best_false_n: best score of a false hit per query, ascending; minus infinity for queries without one.
        training: text with the number of queries that were in the model's training, and the threshold without them.
    """

    threshold: float
    best_false_n: NDArray[np.float64]
    training: str = ""

    def p_values(self, scores_K: NDArray[np.floating]) -> NDArray[np.float64]:
        """(K,) probability that a query without relatives has a hit with at least this score (Vovk et al. 2005)."""
        count = len(self.best_false_n)
        # The number of queries with scores at least as high, plus the query itself.
        return (1 + count - np.searchsorted(self.best_false_n, scores_K, side="left")) / (count + 1)


def calibrate(hits: Sequence[tuple[NDArray[np.floating], NDArray[np.bool_]]], error_rate: float) -> Calibration:
    """Find the lowest threshold that keeps the rate. Per query: scores (K,), best first, and a mask of false hits."""
    scores = np.concatenate([scores_K for scores_K, _ in hits]).astype(np.float64)
    # Increase of the query's share at each hit, in descending order of score.
    rises = np.concatenate([np.diff(_largest_shares(is_false_K), prepend=0.0) for _, is_false_K in hits])
    order = np.argsort(-scores, kind="stable")
    risks = (1 + rises[order].cumsum()) / (len(hits) + 1)
    # Equal scores pass together, so only the last of them is checked. The tolerance allows for rounding of sums.
    is_last = np.append(np.diff(scores[order]) != 0, True)[: len(order)]
    allowed = np.flatnonzero(is_last & (risks <= error_rate + 1e-9))
    best_false = [scores_K[is_false_K].max(initial=-math.inf) for scores_K, is_false_K in hits]
    threshold = float(scores[order][allowed[-1]]) if allowed.size else math.inf
    return Calibration(threshold, np.sort(np.array(best_false, dtype=np.float64)))


def _largest_shares(is_false_K: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(K,) running maximum of the share of false hits among the first hits."""
    return np.maximum.accumulate(is_false_K.cumsum() / np.arange(1, len(is_false_K) + 1))


def calibrated(
    index: Index,
    labels_file: Path,
    label_column: str,
    error_rate: float,
    level: int,
    queries: Path | None,
    top_k: int,
    not_missing: Collection[str] = (),
) -> Calibration:
    """Calibrate with proteins of an index, each searched in the rest of it; the first ``top_k`` hits count.

    Args:
        level: a hit is false if its label differs before its last ``level`` parts. Hits without a label are ignored.
        queries: file with the ids of calibrating proteins; None for all with a label.
        not_missing: texts that are values although tables use them for missing values.

    Raises DataError for unknown ids or too few queries.
    """
    from esmeray.dataset.labels.values import labels_by_id, labels_of  # imported here, because it loads pyarrow.compute

    ids = index.ids(np.arange(index.count))
    labels = labels_of(ids, labels_by_id(labels_file, label_column, "search", not_missing), index.source, labels_file)
    rows_n = chosen(queries, {name: number for number, name in enumerate(ids) if name in labels}, labels_file)
    # The method adds one query with false hits only to the calibrating queries.
    if len(rows_n) + 1 < 1 / error_rate:
        raise DataError(
            f"--search.error_rate {error_rate}: {counted(len(rows_n), 'protein{s}')} with a label are too few; "
            f"give at least {math.ceil(1 / error_rate) - 1}"
        )
    groups_N = level_ids([labels.get(name, "") for name in ids], level + 1)[:, level]
    hits = []
    for row, hits_k, scores_k in index.own_hits(rows_n, top_k):
        is_known_k = groups_N[hits_k] >= 0
        hits.append((ascending(index.metric, scores_k[is_known_k]), groups_N[hits_k[is_known_k]] != groups_N[row]))
    trained_n, training = in_training(index.folder, index.sequences(rows_n), "calibrating ")
    if trained_n is not None:
        # Removed as queries only, because a search also meets training proteins in the database.
        others = [hits[number] for number in np.flatnonzero(~trained_n).tolist()]
        is_enough = len(others) + 1 >= 1 / error_rate
        threshold = f"{ascending(index.metric, calibrate(others, error_rate).threshold):.6g}" if is_enough else "-"
        training += f"; threshold without them: {threshold}{' (too few are left)' * (not is_enough)}"
    return replace(calibrate(hits, error_rate), training=training)


def chosen(path: Path | None, numbers: Mapping[str, int], labels: Path) -> NDArray[np.int64]:
    """(n,) numbers of the ids in a file, one per line, or of all with a label. Raises DataError for an unknown id."""
    if not numbers:
        raise DataError(f"{labels}: has no labels for the searched ids")
    if path is None:
        return np.array(list(numbers.values()))
    from esmeray.dataset.table import numbered_lines

    wanted = {line: text.strip() for line, text in numbered_lines(path) if text.strip()}
    if not wanted:
        raise DataError(f"{path}: has no ids; write one per line, or leave the file out")
    matches = match_ids(wanted.values(), numbers, path, f"the proteins with a label in {labels}")
    for line, name in wanted.items():
        if name not in matches:
            raise DataError(f"{path}, line {line}: {name!r} is unknown or has no label; remove it")
    # A protein listed twice is one query.
    return np.array([*dict.fromkeys(numbers[matches[name]] for name in wanted.values())], dtype=np.int64)


def ascending(metric: MetricName, scores: Scores) -> Scores:
    """Negate distances, so that larger is nearer; the same call reverses it."""
    return -scores if metric == "l2" else scores
