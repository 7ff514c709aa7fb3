"""Vectors of all layers, and their scores by linear probes with nested folds.

The outer folds give each row a prediction by a probe that was not fitted to it. Within the training rows of each outer
fold, inner folds choose the penalty of each layer's probe, and the layer. The score of the choice therefore comes from
rows that had no part in it (Varma and Simon 2006). A split in the table takes the place of the outer folds.

Shape legend: N records, R rows (records, or sampled residues), L layers with the embeddings, D channels, K outer folds.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.linear_model import Ridge, RidgeClassifier
from sklearn.model_selection import GridSearchCV, GroupKFold, StratifiedGroupKFold
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esmeray.common.errors import DataError
from esmeray.common.figure_style import BLUE, ORANGE, legend, picture, style_steps
from esmeray.common.progress import record_bar, status_line
from esmeray.common.statistics import RESAMPLINGS, percentile_interval, resamplings
from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.dataset.labels.labelled_file import LabelledRecords
from esmeray.dataset.section import LabelsSection
from esmeray.dataset.targets import has_target
from esmeray.inference.models.model import Model, TokenizedTexts, run
from esmeray.model.metrics.weighted import Correlation

SAMPLED_RESIDUES = 20_000
"""Maximum number of residues; more change the choice little, and probes take minutes per layer."""
FOLDS = 5
"""Number of outer folds, and of the inner folds in each."""
_PENALTIES = np.logspace(-1, 5, 7)

Floats = NDArray[np.floating]


def rows_of(records: LabelledRecords, labels: LabelsSection, model: Model, seed: int) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows with a known label, and lines about the records.

    Columns: ``target``, a number or the number of a class; ``record``, ascending; ``offset``, the residue in its
    record; ``group``, which no fold splits; and ``is_training`` if the records have parts. Raises DataError if there is
    a single class.
    """
    space = LabelSpace.of(records.labels, labels.kind, labels.label_columns, labels.unknown_letters)
    notes = [f"{len(records):,} records: {space}", *records.counts.lines()]
    notes.extend(filter(None, [model.facts.unknown.report(records.texts)]))
    is_per_residue = labels.kind == "per_residue"
    lengths_N = [len(text) if is_per_residue else 1 for text in records.texts]
    rows = pd.DataFrame({"record": np.repeat(np.arange(len(records)), lengths_N)})
    rows["offset"] = rows.groupby("record").cumcount()
    rows["target"] = space.encode(records.labels, labels.unknown_letters)[0][:].reshape(-1)
    # Equal sequences are a group, because a probe must not be tested on what it has learnt.
    rows["group"] = pd.factorize(np.array(records.groups or records.texts))[0][rows["record"]]
    if records.parts is not None:
        rows["is_training"] = np.array(records.parts)[rows["record"]] == "training"
    rows = rows[has_target(rows["target"]) & (rows["offset"] < (model.facts.longest or np.inf))]
    if is_per_residue and len(rows) > SAMPLED_RESIDUES:
        notes.append(f"{SAMPLED_RESIDUES:,} of {len(rows):,} labelled residues sampled")
        rows = rows.sample(SAMPLED_RESIDUES, random_state=seed).sort_index()
    return rows, notes


def layer_vectors(model: Model, texts: Sequence[str], rows: pd.DataFrame, tokens: int) -> list[Floats]:
    """(R, D) of each layer, from one pass: vectors of the residues if any row has an offset, otherwise means."""
    outputs = model.outputs(["residues" if rows["offset"].any() else "mean"], range(model.facts.num_layers + 1))
    vectors_LRD = [np.empty((len(rows), output.channels), np.float32) for output in outputs]
    # Rows of text i are bounds[i] to bounds[i + 1].
    bounds = np.searchsorted(rows["record"], np.arange(len(texts) + 1))
    offsets_R = rows["offset"].to_numpy()
    done = 0
    with record_bar("computing all layers") as bar:
        tokenized = model.tokenize(texts, model.facts.longest)
        for batch in run(model, TokenizedTexts(tokenized, model), outputs, tokens):
            for vectors_RD, output in zip(vectors_LRD, outputs, strict=True):
                for text, own in zip(batch.indices, batch.by_text(output), strict=True):
                    chosen = slice(bounds[text], bounds[text + 1])
                    vectors_RD[chosen] = own.reshape(-1, output.channels)[offsets_R[chosen]]
            done += len(batch.indices)
            bar(done / len(texts), done)
    return vectors_LRD


def score_layers(
    vectors_LRD: Sequence[Floats], rows: pd.DataFrame, retrieval: bool, seed: int
) -> tuple[int, str, tuple[float, float, float], pd.DataFrame]:
    """Return the chosen layer, the metric, its held-out score with an interval, and the table of all layers.

    ``retrieval``: predict the label of the nearest neighbour by cosine instead of fitting a probe. Raises DataError if
    there are too few groups for the folds.
    """
    targets_R = rows["target"].to_numpy()
    is_number = targets_R.dtype.kind == "f"
    probe: Any = make_pipeline(StandardScaler(), Ridge() if is_number else RidgeClassifier())
    grid: dict[str, Any] = {f"{probe.steps[1][0]}__alpha": _PENALTIES}
    if retrieval:
        probe, grid = KNeighborsClassifier(1, metric="cosine"), {}
    # Classes that are all small, as in retrieval, can't be in every fold.
    is_small = is_number or np.bincount(targets_R).max() < FOLDS * FOLDS
    kind: Any = GroupKFold if is_small else StratifiedGroupKFold
    outer = _folds(kind, rows, seed)
    if "is_training" in rows:
        if rows["is_training"].all():
            raise DataError("data.labels.split: no labelled record is held out")
        outer = [(np.flatnonzero(rows["is_training"]), np.flatnonzero(~rows["is_training"]))]
    inner_KL = np.zeros((len(outer), len(vectors_LRD)))
    # The last row holds the predictions of the layers that the inner folds choose.
    predicted_LR = np.zeros((len(vectors_LRD) + 1, len(rows)), targets_R.dtype)
    with status_line("fitting probes") as status:
        for fold, (train, test) in enumerate(outer):
            inner = _folds(kind, rows.iloc[train], seed)
            for layer, vectors_RD in enumerate(vectors_LRD):
                status(f"fitting probes: fold {fold + 1} of {len(outer)}, layer {layer} of {len(vectors_LRD) - 1}")
                search = GridSearchCV(probe, grid, scoring=_fitted_score, cv=inner)
                search.fit(vectors_RD[train], targets_R[train])
                # A correlation with constant predictions is not defined.
                inner_KL[fold, layer] = np.nan_to_num(search.best_score_)
                predicted_LR[layer, test] = search.predict(vectors_RD[test])
            predicted_LR[-1, test] = predicted_LR[_best(inner_KL[fold]), test]
    tested = np.concatenate([test for _, test in outer])
    records_R = pd.factorize(rows["record"].iloc[tested])[0]
    *scores, choice = [_score(predicted_R[tested], targets_R[tested], records_R, seed) for predicted_R in predicted_LR]
    metric = "spearman" if is_number else "accuracy"
    table = pd.DataFrame(scores, columns=[metric, "low", "high"]).assign(inner=inner_KL.mean(0))
    return _best(inner_KL.mean(0)), metric, choice, table.rename_axis("layer").reset_index()


def _folds(kind: Any, rows: pd.DataFrame, seed: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Training and test rows of each fold. No group is in both."""
    if rows["group"].nunique() < FOLDS * FOLDS:
        raise DataError(f"{rows['group'].nunique()} distinct sequences or groups are too few to choose a layer by")
    return [*kind(FOLDS, shuffle=True, random_state=seed).split(rows, rows["target"], rows["group"])]


def _best(inner_L: Floats) -> int:
    # The embeddings, layer 0, are a baseline, which is no model to cut.
    return int(inner_L[1:].argmax()) + 1


def _fitted_score(fitted: Any, vectors_RD: Floats, targets_R: NDArray) -> float:
    return _metric(fitted.predict(vectors_RD), targets_R)(np.ones(len(targets_R)))


def _metric(predicted_R: NDArray, targets_R: NDArray) -> Callable[[Floats], float]:
    """Return the function from weights of the rows to Spearman's coefficient of numbers, or accuracy of classes."""
    if targets_R.dtype.kind == "f":
        correlation = Correlation(predicted_R, targets_R)
        return lambda weights_R: correlation(weights_R)["spearman"]
    return lambda weights_R: float(np.average(predicted_R == targets_R, weights=weights_R))


def _score(
    predicted_R: NDArray, targets_R: NDArray, records_R: NDArray[np.int64], seed: int
) -> tuple[float, float, float]:
    """The metric and its interval. Whole records are drawn, because residues of a protein are not independent."""
    metric = _metric(predicted_R, targets_R)
    drawn = [metric(counts_N[records_R]) for counts_N in resamplings(records_R.max() + 1, RESAMPLINGS, seed)]
    return metric(np.ones(len(targets_R))), *(percentile_interval(drawn) or (np.nan, np.nan))


def draw(path: Path, table: pd.DataFrame, chosen: int, name: str) -> None:
    layer, metric = table.columns[:2]
    with picture(path, 7.0, 4.0, f"Layers of {name}") as figure:
        axes = figure.add_subplot()
        style_steps(axes)
        axes.margins(x=0.03)  # whole caps of the intervals
        errors = table[metric] - table["low"], table["high"] - table[metric]
        axes.errorbar(table[layer], table[metric], errors, color=BLUE, marker="o", capsize=3, label="held-out, 95 %")
        axes.plot(table[layer], table["inner"], "--", color=ORANGE, label=f"inner folds: layer {chosen} is best")
        axes.set(xlabel="layer (0: embeddings)", ylabel=metric)
        legend(axes, over_curves=True)
