"""Ranker over the parts of a blend: gradient boosting on features of a protein and a term.

In: scores of the parts and of the blend, bit scores of the hits, and statistics of the terms. Out: probabilities of the
terms that the blend scores highest; other terms have none. The blend uses the same weights for every protein. The
ranker can trust homology if hits are near, and the other parts if there are none.

Shape legend: N proteins, M annotated proteins of an aspect, V its terms, K candidates (a protein and a term), F
features, H hits of a protein, E trees, J nodes of a tree.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import expit
from scipy.stats import rankdata

from esmeray.function.ontology import Aspect, propagate
from esmeray.function.predictors import pruned

_MAX_CANDIDATES = 300
"""Maximum number of candidates per protein."""
_MIN_SCORE = 8e-3
"""Minimum blend score of a candidate: lower ones seldom reach CAFA's first threshold, 0.01."""
_FOLDS = 4
_TREES = 80
_LEAVES = 12


class Candidates(NamedTuple):
    """(K,) rows and columns in a matrix of proteins by terms of ``shape``, and (K, F) float32 features."""

    features: NDArray[np.float32]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    shape: tuple[int, int]


def candidates(
    parts: Mapping[str, csr_array],
    blend: csr_array,
    near: csr_array,
    terms: csr_array,
    aspect: Aspect,
    accretion_V: NDArray[np.float64],
) -> Candidates:
    """Select the candidates of N proteins and compute their features.

    ``parts`` and ``blend`` are (N, V) scores, ``near`` (N, M) hits in bits per residue, ``terms`` the annotations (M,
    V).
    """
    count_V = np.bincount(terms.indices, minlength=terms.shape[1])
    of_terms = np.stack([np.log1p(count_V), aspect.levels, accretion_V])
    features = [np.empty((0, 2 * len(parts) + 9), np.float32)]
    columns = []
    for row in range(blend.shape[0]):
        scores = np.stack([part[[row]].toarray()[0] for part in (*parts.values(), blend)])
        best = np.sort(np.argsort(-scores[-1], kind="stable")[:_MAX_CANDIDATES])
        best = best[scores[-1, best] >= _MIN_SCORE]
        scores = scores[:, best]
        # A score alone says little, since proteins differ in their number of candidates; the rank is comparable.
        ranks = rankdata(-scores, method="min", axis=1)
        hits = near[[row]]
        has_HK = terms[hits.indices][:, best].toarray()
        nearest_K = (has_HK * hits.data[:, None]).max(axis=0, initial=0)
        of_protein = np.broadcast_to([[hits.data.max(initial=0)], [hits.nnz]], (2, len(best)))
        block = [scores, np.log1p(ranks), of_terms[:, best], nearest_K[None], has_HK.sum(axis=0)[None], of_protein]
        features.append(np.concatenate(block).T.astype(np.float32))
        columns.append(best)
    rows = np.repeat(np.arange(blend.shape[0]), list(map(len, columns)))
    return Candidates(np.concatenate(features), rows, np.concatenate([np.empty(0, np.int64), *columns]), blend.shape)


class Ranker(NamedTuple):
    """Boosted trees as arrays (E, J), stored without pickle; a leaf is its own child. Baselines are averaged."""

    features: NDArray[np.int64]
    thresholds: NDArray[np.float64]
    children: NDArray[np.int64]
    values: NDArray[np.float64]
    baselines: NDArray[np.float64]

    @classmethod
    def load(cls, path: Path) -> "Ranker":
        with np.load(path) as arrays:
            return cls(*(arrays[name] for name in cls._fields))

    def save(self, path: Path) -> None:
        np.savez(path, **self._asdict())

    def probabilities(self, features_KF: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the (K,) probabilities of candidates."""
        sums_K = np.full(len(features_KF), self.baselines.mean())
        every_K = np.arange(len(features_KF))
        for feature_J, threshold_J, children_J2, value_J in zip(*self[:4], strict=True):
            node_K = np.zeros(len(features_KF), np.int64)
            while True:
                right_K = features_KF[every_K, feature_J[node_K]] > threshold_J[node_K]
                below_K = children_J2[node_K, right_K.astype(np.int64)]
                if (below_K == node_K).all():
                    break
                node_K = below_K
            sums_K += value_J[node_K]
        return expit(sums_K)


def scored(values_K: NDArray[np.float64], candidates: Candidates, aspect: Aspect) -> csr_array:
    """Return (N, V) scores of candidates in which no term scores above its parents."""
    return propagate(
        pruned(csr_array((values_K, (candidates.rows, candidates.columns)), shape=candidates.shape)), aspect
    )


def fit_ranker(candidates: Candidates, terms: csr_array) -> tuple[Ranker, NDArray[np.float64]]:
    """Fit the ranker to the terms (N, V); return it with (K,) cross-fitted probabilities.

    Cross-fitted probabilities come from rankers that have not seen the protein, so that they can be evaluated.
    """
    crossed_K = np.zeros(len(candidates.rows))
    if not len(crossed_K):  # no part scores any protein, so the ranker has nothing to learn
        no_nodes = np.zeros((0, 1), np.int64)
        no_values = np.zeros((0, 1))
        return Ranker(no_nodes, no_values, no_nodes, no_values, np.array([-np.inf])), crossed_K
    from sklearn.ensemble import HistGradientBoostingClassifier  # imported here: it takes a second

    truth_K = np.asarray(terms[candidates.rows, candidates.columns]).ravel()
    rankers = []
    for fold in range(_FOLDS):
        test_K = candidates.rows % _FOLDS == fold
        seen_K = ~test_K | test_K.all()  # a single protein is in one fold only: train and test on it
        model: Any = HistGradientBoostingClassifier(
            max_iter=_TREES, max_leaf_nodes=_LEAVES, learning_rate=0.1, min_samples_leaf=200, l2_regularization=1,
            early_stopping=False, random_state=0,
        )  # fmt: skip
        ranker = trees_of(model.fit(candidates.features[seen_K], truth_K[seen_K]))
        crossed_K[test_K] = ranker.probabilities(candidates.features[test_K])
        rankers.append(ranker)
    # Mean of the log-odds of the folds' rankers. On CAFA2 it beats one ranker of all proteins in four of six metrics
    # and loses in one.
    features, thresholds, children, values, baselines = map(np.concatenate, zip(*rankers, strict=True))
    return Ranker(features, thresholds, children, values / _FOLDS, baselines), crossed_K


def trees_of(model: Any) -> Ranker:
    """Return the trees of a fitted binary HistGradientBoostingClassifier with at most ``_LEAVES`` leaves."""
    shape = len(model._predictors), 2 * _LEAVES - 1
    children = np.tile(np.arange(shape[1])[:, None], (shape[0], 1, 2))
    features = np.zeros(shape, np.int64)
    thresholds, values = np.zeros((2, *shape))
    # scikit-learn 1.9 has no public name for the nodes.
    for tree, (predictor,) in enumerate(model._predictors):
        nodes = predictor.nodes
        inner = np.flatnonzero(nodes["is_leaf"] == 0)
        features[tree, inner] = nodes["feature_idx"][inner]
        thresholds[tree, inner] = nodes["num_threshold"][inner]
        children[tree, inner] = np.stack([nodes["left"][inner], nodes["right"][inner]], axis=1)
        values[tree, : len(nodes)] = nodes["value"]
    return Ranker(features, thresholds, children, values, np.ravel(model._baseline_prediction))
