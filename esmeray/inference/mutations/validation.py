"""Cross-validate a fit on folds as in ProteinGym, compare it with simpler scores, and draw its learning curve.

Shape legend: N mutants.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.linear_model import Ridge

from esmeray.common.errors import ConfigError
from esmeray.common.figure_style import BLUE, GREEN, ORANGE, legend, picture, style
from esmeray.common.progress import record_bar
from esmeray.inference.mutations.features import Features, Measured, one_hot
from esmeray.inference.mutations.gaussian_process import Posterior, Prediction
from esmeray.inference.mutations.metrics import evaluation_of, metrics_table
from esmeray.inference.mutations.section import Folds, MutationFitSection
from esmeray.inference.mutations.variants import Mutant

NUM_FOLDS = 5
RESAMPLINGS = 100
"""Resamplings for the intervals: fewer than elsewhere, as each kind of fold and each size has some."""
ALL = "all"
"""Number of training mutants, in keys, if all mutants of the other folds are used."""
Evaluations: TypeAlias = dict[str, dict[str, dict[str, Any]]]
"""Evaluations by kind of fold and number of training mutants, then by protein; input of metrics_lines."""


def folds(
    kind: Folds, mutants: Sequence[Mutant], seed: int, groups_N: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """(N,) fold of each mutant: random, as whole groups if there are any, or by position.

    Positions are ranked among the mutated positions. Folds by position alternate (modulo) or are segments (contiguous).

    Raises ConfigError for groups or several mutations in folds by position, and for too few positions.
    """
    if kind == "rest":
        return np.zeros(len(mutants), np.int64)
    if kind == "random":
        units_N = np.arange(len(mutants)) if groups_N is None else groups_N
        return np.random.default_rng(seed).integers(NUM_FOLDS, size=units_N.max() + 1)[units_N]
    if groups_N is not None:
        raise ConfigError(f"folds {kind}: would split groups; use random or rest")
    if any(len(mutant.mutations) != 1 for mutant in mutants):
        raise ConfigError(f"folds {kind}: need single mutants; use only random")
    # Ranks instead of position numbers, because folds could be empty if few positions are mutated.
    positions, index_N = np.unique([mutant.mutations[0].offset for mutant in mutants], return_inverse=True)
    if len(positions) < NUM_FOLDS:
        raise ConfigError(f"folds {kind}: {len(positions)} mutated positions, fewer than folds; use only random")
    if kind == "modulo":
        return index_N % NUM_FOLDS
    segments = np.array_split(np.arange(len(positions)), NUM_FOLDS)
    return np.repeat(np.arange(NUM_FOLDS), [*map(len, segments)])[index_N]


def parts(
    fold_N: NDArray[np.int64], size: int | None, seed: int, groups_N: NDArray[np.int64] | None = None
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Training and test rows of each fold, with ``size`` training mutants if it is given.

    With a single fold the test rows are all others, without mutants of groups in training. The same seed draws the same
    mutants. Raises ConfigError if the training part is smaller than ``size``, or if either part is empty.
    """
    random = np.random.default_rng(seed)
    pairs = []
    for fold in np.unique(fold_N):
        test = np.flatnonzero(fold_N == fold)
        train = np.flatnonzero(fold_N != fold) if fold_N.any() else test
        if size is not None:
            if size > len(train):
                raise ConfigError(f"sizes {size}: a training set has only {len(train):,} mutants; give a smaller size")
            if groups_N is None or fold_N.any():
                train = random.choice(train, size, replace=False)
            else:
                # Drawn group by group: drawing single mutants would touch nearly every group.
                train = np.argsort(random.permutation(len(np.unique(groups_N)))[groups_N], kind="stable")[:size]
                test = np.flatnonzero(~np.isin(groups_N, groups_N[train]))
        test = np.setdiff1d(test, train)
        if not (len(train) and len(test)):
            raise ConfigError("folds: no mutants left for training or for testing; give smaller sizes, or more groups")
        pairs.append((train, test))
    return pairs


def evaluations(measured: Sequence[Measured], section: MutationFitSection) -> Evaluations:
    """Evaluate the model for each kind of fold and size, with the zero-shot score and one-hot ridge as baselines."""
    kinds = {part.protein.name: _kinds(part, section) for part in measured}
    ordered = dict.fromkeys(kind for of_protein in kinds.values() for kind in of_protein)
    # None trains on all other folds. With `rest` nothing would be left to predict.
    runs = [(kind, size) for kind in ordered for size in (None, *section.sizes) if kind != "rest" or size is not None]
    evaluated: Evaluations = {}
    with record_bar("cross-validating") as bar:
        for done, (kind, size) in enumerate(runs):
            bar(done / len(runs), done)
            key = f"Folds {kind}, {ALL if size is None else size} training mutants"
            evaluated[key] = {
                part.protein.name: _evaluation(part, kind, size, section)
                for part in measured
                if kind in kinds[part.protein.name]
            }
    return evaluated


def _kinds(part: Measured, section: MutationFitSection) -> list[Folds]:
    by_position = part.groups is None and all(len(mutant.mutations) == 1 for mutant in part.mutants)
    default: list[Folds] = ["random", "modulo", "contiguous"] if by_position else ["random"]
    return section.folds or default


def _evaluation(part: Measured, kind: Folds, size: int | None, section: MutationFitSection) -> dict[str, Any]:
    features, values_N = part.features, part.values
    pairs = parts(folds(kind, part.mutants, section.seed, part.groups), size, section.seed, part.groups)
    predicted = predictions(features, values_N, pairs, part.replicates)
    scores = {"model": predicted.mean, "zero-shot score": features.parts["prior"][:, 0]}
    if "site" in features.parts:
        one_hot_ND = one_hot(part.protein, part.mutants)
        ridge_N = np.full(len(values_N), np.nan)
        for train, test in pairs:
            ridge = Ridge(solver="lsqr").fit(one_hot_ND[train], values_N[train], sample_weight=part.replicates[train])
            ridge_N[test] = ridge.predict(one_hot_ND[test])
        scores["ridge on one-hot"] = ridge_N
    evaluation = evaluation_of(scores, values_N, samples=RESAMPLINGS, seed=section.seed)
    tested_N = np.isfinite(predicted.mean)
    holds_N = (predicted.low <= values_N) & (values_N <= predicted.high)
    evaluation["metrics"]["in 90 % interval"] = float(holds_N[tested_N].mean())
    return evaluation


def predictions(
    features: Features,
    values_N: NDArray[np.float64],
    pairs: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
    replicates_N: NDArray[np.float64] | None = None,
) -> Prediction:
    """Predict each test row with a model of its training rows; NaN for rows outside of all test parts.

    Intervals are for the mean of each row's number of measurements.
    """
    predicted = Prediction.unknown(len(values_N))
    replicates_N = np.ones(len(values_N)) if replicates_N is None else replicates_N
    for train, test in pairs:
        process = Posterior(features[train], values_N[train], replicates_N=replicates_N[train])
        predicted.put(test, process.predict(features[test], replicates_N[test]))
    return predicted


def draw_learning_curves(path: Path, evaluated: Evaluations) -> None:
    """Draw Spearman's coefficient by the number of training mutants, a panel per kind of fold.

    It is averaged over proteins. If no size is given, nothing is drawn.
    """
    means = [
        (key.split()[1:3], metrics_table(parts).filter(like="spearman").mean()) for key, parts in evaluated.items()
    ]
    rows = [{"folds": kind, "size": int(size), **mean} for (kind, size), mean in means if size != ALL]
    if not rows:
        return
    by_kind = pd.DataFrame(rows).groupby("folds", sort=False)
    with picture(path, 1 + 4.0 * len(by_kind), 4.0, "Learning curve") as figure:
        panels = figure.subplots(1, len(by_kind), squeeze=False, sharey=True)[0]
        for axes, (kind, table) in zip(panels, by_kind, strict=True):
            style(axes, f"folds {kind.strip(',')}")
            curves = table.drop(columns="folds").set_index("size").sort_index()
            for name, colour in zip(curves, (BLUE, ORANGE, GREEN), strict=False):
                axes.plot(curves.index, curves[name], "o-", color=colour, label=name.partition(" of ")[2] or "model")
            axes.set(xscale="log", xlabel="training mutants")
            axes.set_xticks(curves.index, [*map(str, curves.index)])
            axes.minorticks_off()
        panels[0].set_ylabel("Spearman's coefficient")
        legend(panels[0])
