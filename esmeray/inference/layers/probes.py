"""Score each layer by linear probes with nested folds, and choose one.

The outer folds give each row a prediction by a probe that was not fitted to it. Within the training rows of each outer
fold, inner folds choose the penalty of each layer's probe, and the layer. The score of the choice therefore comes from
rows that had no part in it (Varma and Simon 2006). A split that the table gives takes the place of the outer folds.

A probe is a ridge regression on standardized channels, for classes with a column of -1 and 1 per class. Retrieval has
no probe: it predicts the label of the nearest neighbour by cosine, outside of the row's group.

Shape legend: R rows, L layers, D channels, K outer folds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import Ridge, RidgeClassifier
from sklearn.model_selection import GridSearchCV, GroupKFold, StratifiedGroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esmeray.common.errors import DataError
from esmeray.common.progress import record_bar
from esmeray.common.statistics import RESAMPLINGS, percentile_interval, resamplings
from esmeray.inference.layers.labels import LabelledRows
from esmeray.model.metrics.weighted import Correlation

FOLDS = 5
"""Number of outer folds, and of the inner folds in each."""
_PENALTIES = np.logspace(-1, 5, 7)
_BLOCK = 1024
"""Rows whose similarities to all rows are computed at once."""

Floats = NDArray[np.floating]
Rows = NDArray[np.int64]


class Score(NamedTuple):
    """A metric on held-out rows, and its 95 % bootstrap interval over records."""

    value: float
    low: float
    high: float


class LayerScores(NamedTuple):
    """Scores of all layers, and of the choice.

    Attributes:
        metric: accuracy or spearman.
        held_out: scores of each layer on the held-out rows.
        inner: (L,) mean scores in the inner folds, which choose the layer.
        choice: score of the layers that the inner folds of each outer fold choose, on the held-out rows.
    """

    metric: str
    held_out: list[Score]
    inner: Floats
    choice: Score


def score_layers(vectors_LRD: list[Floats], rows: LabelledRows, retrieval: bool, seed: int) -> LayerScores:
    """Score the layers. Raises DataError if there are too few groups for the folds."""
    everything = np.arange(len(rows.targets))
    if rows.training is None:
        pairs = _folds(rows, everything, seed)
    else:
        pairs = [(np.flatnonzero(rows.training), np.flatnonzero(~rows.training))]
    inner_pairs = [[] if retrieval else _folds(rows, train, seed) for train, _ in pairs]
    inner_KL = np.zeros((len(pairs), len(vectors_LRD)))
    predicted_LR = np.zeros((len(vectors_LRD), len(everything)), rows.targets.dtype)
    with record_bar("scoring layers") as bar:
        for layer, vectors_RD in enumerate(vectors_LRD):
            nearest_R = _nearest(vectors_RD, rows) if retrieval else None
            for fold, (train, test) in enumerate(pairs):
                if nearest_R is None:
                    probe = _fitted(vectors_RD[train], rows, train, inner_pairs[fold])
                    inner_KL[fold, layer] = probe.best_score_
                    predicted_LR[layer, test] = probe.predict(vectors_RD[test])
                else:
                    inner_KL[fold, layer] = _score(nearest_R[train], rows.targets[train])
                    predicted_LR[layer, test] = nearest_R[test]
            bar((layer + 1) / len(vectors_LRD), layer + 1)
    tested = np.concatenate([test for _, test in pairs])
    chosen = [np.full(len(test), best) for (_, test), best in zip(pairs, inner_KL.argmax(1), strict=True)]
    choice_R = predicted_LR[np.concatenate(chosen), tested]

    def score(predicted_R: NDArray) -> Score:
        return _with_interval(predicted_R, rows.targets[tested], rows.records[tested], seed)

    metric = "spearman" if rows.kind == "regression" else "accuracy"
    held_out = [score(predicted_R[tested]) for predicted_R in predicted_LR]
    return LayerScores(metric, held_out, inner_KL.mean(0), score(choice_R))


def _folds(rows: LabelledRows, own: Rows, seed: int) -> list[tuple[Rows, Rows]]:
    """Training and test part of each fold, as indices into ``own``. No group is in both."""
    kind = GroupKFold if rows.kind == "regression" else StratifiedGroupKFold
    groups = rows.groups[own]
    if len(np.unique(groups)) < 2 * FOLDS:
        raise DataError(f"{len(np.unique(groups))} groups of distinct sequences are too few for {FOLDS} folds")
    return [*kind(FOLDS, shuffle=True, random_state=seed).split(groups, rows.targets[own], groups)]


def _fitted(vectors_RD: Floats, rows: LabelledRows, own: Rows, pairs: list[tuple[Rows, Rows]]) -> Any:
    """Probe with the penalty that the inner folds choose, fitted to all these rows."""
    linear: Any = Ridge() if rows.kind == "regression" else RidgeClassifier()
    probe = make_pipeline(StandardScaler(), linear)
    grid = {f"{type(linear).__name__.lower()}__alpha": _PENALTIES}
    return GridSearchCV(probe, grid, scoring=lambda fitted, x, y: _score(fitted.predict(x), y), cv=pairs).fit(
        vectors_RD, rows.targets[own]
    )


def _nearest(vectors_RD: Floats, rows: LabelledRows) -> NDArray:
    """(R,) target of the nearest row by cosine in another group."""
    unit_RD = vectors_RD / np.linalg.norm(vectors_RD, axis=1, keepdims=True).clip(1e-12)
    nearest = []
    for start in range(0, len(unit_RD), _BLOCK):
        own = slice(start, start + _BLOCK)
        similar = unit_RD[own] @ unit_RD.T
        similar[rows.groups[own, None] == rows.groups] = -np.inf
        nearest.append(similar.argmax(1))
    return rows.targets[np.concatenate(nearest)]


def _score(predicted_R: NDArray, targets_R: NDArray) -> float:
    return _metric(predicted_R, targets_R)(np.ones(len(targets_R)))


def _metric(predicted_R: NDArray, targets_R: NDArray) -> Callable[[Floats], float]:
    """Return the function from the weights of rows to the metric: Spearman of numbers, accuracy of classes."""
    if targets_R.dtype.kind == "f":
        correlation = Correlation(predicted_R, targets_R)
        return lambda weights_R: correlation(weights_R)["spearman"]
    return lambda weights_R: float(np.average(predicted_R == targets_R, weights=weights_R))


def _with_interval(predicted_R: NDArray, targets_R: NDArray, records_R: Rows, seed: int) -> Score:
    metric = _metric(predicted_R, targets_R)
    distinct, index_R = np.unique(records_R, return_inverse=True)
    # Whole records are drawn, because residues of a protein are not independent. Equal draws for all layers.
    drawn = [metric(counts[index_R]) for counts in resamplings(len(distinct), RESAMPLINGS, seed)]
    return Score(metric(np.ones(len(targets_R))), *(percentile_interval(drawn) or (np.nan, np.nan)))
