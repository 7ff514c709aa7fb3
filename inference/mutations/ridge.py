"""Ridge regression on features of mutants and their zero-shot score (Hsu et al. 2022, Nature Biotechnology 40), and its
cross-validation on folds as ProteinGym's.

The penalty of the features is chosen by leave-one-out on the training mutants; the zero-shot score has next to none, so
that few mutants leave its order alone. Shape legend: N mutants, D features.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, hstack, issparse
from sklearn.linear_model import RidgeCV

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.mutations.section import Folds
from esmeray.inference.mutations.variants import Mutant, Protein

Features: TypeAlias = Any
"""(N, D): an array, or a sparse one."""
NUM_FOLDS = 5
_PENALTIES = np.logspace(-3, 3, 13)
"""Of features whose distance from their mean is 1 on average."""
_UNPENALISED = 100.0
"""The zero-shot score's standard deviation, by which it counts 10,000 times less in the penalty."""


class Ridge(NamedTuple):
    """A linear model: (D,) weights of the features, that of the zero-shot score, and the intercept."""

    weights: list[float]
    zero_shot: float
    intercept: float

    def predict(self, features_ND: Features, zero_shot_N: NDArray[np.float64]) -> NDArray[np.float64]:
        return features_ND @ self.weights + self.zero_shot * zero_shot_N + self.intercept


def fit(features_ND: Features, zero_shot_N: NDArray[np.float64], measured_N: NDArray[np.float64]) -> Ridge:
    """Fit to measured values; a zero-shot score that is always 0 has no part.

    Columns of one row each are left out of the decomposition, and the result is the same: in the Gram matrix they are
    the identity, as the penalty is, so they are added to that. Of one-hot single mutants some hundred columns of
    thousands remain, and the time of a fit is cubic in the smaller of rows and columns.
    """
    own_N = _own_columns(features_ND) if issparse(features_ND) else None
    shared = np.arange(features_ND.shape[1]) if own_N is None else np.setdiff1d(features_ND.indices, own_N)
    dense_NS = features_ND[:, shared].toarray() if issparse(features_ND) else features_ND
    mean_S, mean = dense_NS.mean(axis=0), zero_shot_N.mean()
    centred_NS = dense_NS - mean_S
    # The columns left out have their part in the distance of a row from the mean: 1 at its own, 1/N at the others'.
    variance = (centred_NS**2).sum(axis=1).mean() + (0.0 if own_N is None else 1 - 1 / len(measured_N))
    # One scale for all features, and not one for each, which would make rare residues count like common ones.
    scale = np.sqrt(variance) or 1.0
    spread = (zero_shot_N.std() or 1.0) / _UNPENALISED
    inputs = np.column_stack([centred_NS / scale, (zero_shot_N - mean) / spread])
    model = RidgeCV(_PENALTIES + (0.0 if own_N is None else scale**-2)).fit(inputs, measured_N)
    # Weights of the features as they come, so that a prediction needs neither scale nor mean.
    weights_D = np.zeros(features_ND.shape[1])
    weights_D[shared], zero_shot = model.coef_[:-1] / scale, model.coef_[-1] / spread
    intercept = float(model.intercept_ - mean_S @ weights_D[shared] - mean * zero_shot)
    if own_N is not None:  # what a row's own column explains is its residual; over all rows that is 0, as is their mean
        weights_D[own_N] = (measured_N - model.predict(inputs)) / (model.alpha_ * scale**2)
    return Ridge(weights_D.tolist(), float(zero_shot), intercept)


def _own_columns(features_ND: csr_array) -> NDArray[np.int64] | None:
    """(N,) for each row a column that is 1 there and 0 in all others; None where a row has no such column."""
    uses_D = np.bincount(features_ND.indices, minlength=features_ND.shape[1])
    are_own = (uses_D[features_ND.indices] == 1) & (features_ND.data == 1)
    rows = np.repeat(np.arange(features_ND.shape[0]), np.diff(features_ND.indptr))[are_own]
    owners, first = np.unique(rows, return_index=True)
    return features_ND.indices[are_own][first] if len(owners) == features_ND.shape[0] else None


def one_hot(protein: Protein, mutants: Sequence[Mutant]) -> csr_array:
    """(N, L * 20): 1 for a new residue, -1 for that of the wild type. Raises DataError for insertions and deletions."""
    if any(mutant.whole is not None for mutant in mutants):
        raise DataError("features one_hot: are of substitutions alone; give embeddings")
    signs, rows, columns = [], [], []
    for row, mutant in enumerate(mutants):
        for wild, offset, letter in mutant.mutations:
            signs += [1.0, -1.0]
            rows += [row, row]
            columns += [20 * offset + AMINO_ACIDS.index(letter), 20 * offset + AMINO_ACIDS.index(wild)]
    return csr_array((signs, (rows, columns)), shape=(len(mutants), 20 * len(protein.sequence)))


def with_composition(one_hot_ND: csr_array) -> csr_array:
    """(N, D + 20): the amino acids won and lost beside, which say something of positions that no mutant had yet."""
    composition = np.tile(np.eye(20), (one_hot_ND.shape[1] // 20, 1))
    return csr_array(hstack([one_hot_ND, one_hot_ND @ composition]))


def folds(kind: Folds, mutants: Sequence[Mutant], seed: int) -> NDArray[np.int64]:
    """(N,) fold of each mutant: at random, or by its position, of those that are mutated: in turn (modulo) or in
    segments (contiguous). Raises ConfigError where these are not single mutants, or too few positions."""
    if kind == "random":
        return np.random.default_rng(seed).integers(NUM_FOLDS, size=len(mutants))
    if any(len(mutant.mutations) != 1 for mutant in mutants):
        raise ConfigError(f"folds {kind}: are of single mutants; give random alone")
    # By the position's rank, not its number: of a protein of which few are mutated folds would else be empty.
    positions, index_N = np.unique([mutant.mutations[0].offset for mutant in mutants], return_inverse=True)
    if len(positions) < NUM_FOLDS:
        raise ConfigError(f"folds {kind}: {len(positions)} positions are mutated, fewer than folds; give random alone")
    if kind == "modulo":
        return index_N % NUM_FOLDS
    segments = np.array_split(np.arange(len(positions)), NUM_FOLDS)
    return np.repeat(np.arange(NUM_FOLDS), [*map(len, segments)])[index_N]


def cross_validated(
    features_ND: Features,
    zero_shot_N: NDArray[np.float64],
    measured_N: NDArray[np.float64],
    fold_N: NDArray[np.int64],
    size: int | None,
    seed: int,
) -> NDArray[np.float64]:
    """(N,) predictions of each mutant by a model of the other folds, or of ``size`` mutants of them.

    The same seed draws the same mutants. Raises ConfigError where a training part is smaller.
    """
    predicted_N = np.empty(len(measured_N))
    # One generator for all folds: the same seed draws the same mutants for the model and for its baselines.
    random = np.random.default_rng(seed)
    for fold in np.unique(fold_N):
        train, test = np.flatnonzero(fold_N != fold), np.flatnonzero(fold_N == fold)
        if size is not None:
            if size > len(train):
                raise ConfigError(f"sizes {size}: a training part has {len(train):,} mutants; give fewer")
            train = random.choice(train, size, replace=False)
        ridge = fit(features_ND[train], zero_shot_N[train], measured_N[train])
        predicted_N[test] = ridge.predict(features_ND[test], zero_shot_N[test])
    return predicted_N
