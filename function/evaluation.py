"""Predicted terms against annotated ones, as CAFA evaluates them.

In: annotations and scores of proteins. Out: at each threshold what cafaeval 1.3 reports, under its names, and best values with
95 % intervals over proteins drawn with replacement. Each score is kept as the number of thresholds that it
reaches; a histogram of these per protein gives all thresholds at once, and a draw is a weighting of the proteins.

Names: ``n`` proteins with predictions; ``tp``, ``fp``, ``fn`` terms; ``pr``, ``rc``, ``f`` precision, recall and their harmonic mean, averaged
over proteins, or with ``_micro`` of the summed terms; ``mi``, ``ru``, ``s`` misinformation, remaining uncertainty and
their distance from the origin (Clark and Radivojac 2013, equations 5 to 8); ``cov`` coverage. Those that end in ``_w`` weight a
term by its information accretion.

Shape legend: N proteins, V terms, T thresholds, B proteins of a block, R draws and before them the value itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from common.errors import DataError
from function.annotations import Annotations
from function.ontology import Aspect
from function.propagation import BLOCK, Method, dense, propagate_dense

Normalisation: TypeAlias = Literal["cafa", "pred", "gt"]
Array: TypeAlias = NDArray[np.float64]
BEST = {"fmax": "f", "fmax_micro": "f_micro", "smin": "s"}
_DRAWS_AT_ONCE = 128


@dataclass(frozen=True)
class Settings:
    """Choices of an evaluation.

    Attributes:
        norm: what averages are taken over: ``pred`` proteins with predictions, ``gt`` all annotated ones, ``cafa`` the
            first for precision and the second for everything else.
        orphans: evaluate terms without parents also; weighted values always have them.
        step: between thresholds, the first of which it is; the last is below 1.
        draws: for the intervals.
    """

    norm: Normalisation = "cafa"
    propagation: Method = "max"
    orphans: bool = True
    step: float = 0.01
    draws: int = 1000
    seed: int = 0


class Metric(NamedTuple):
    """A value, the ends of its 95 % interval, and the threshold where a best value is reached."""

    value: float
    low: float
    high: float
    threshold: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of one aspect.

    Attributes:
        proteins: annotated, all of which count.
        predicted: of these, proteins with any score.
        thresholds_T: those where any protein has a prediction.
        curves: (T,) values by name.
        metrics: best values and areas by name: ``fmax``, ``smin``, ``aupr`` (area under the precision-recall curve by the
            trapezoid rule, without what is left of its first point), ``cov``.
    """

    proteins: int
    predicted: int
    thresholds_T: Array
    curves: dict[str, Array]
    metrics: dict[str, Metric]


class _Counts(NamedTuple):
    """Weights of terms: (T, N) of predicted ones that are annotated, and of all predicted; (N,) of annotated ones."""

    hit_TN: Array
    called_TN: Array
    truth_N: Array


def evaluate(
    aspect: Aspect,
    truth: Annotations,
    scores: csr_array,
    *,
    accretion_V: Array | None = None,
    known: Annotations | None = None,
    terms_V: NDArray[np.bool_] | None = None,
    settings: Settings = Settings(),  # noqa: B008 - frozen
) -> Evaluation:
    """Evaluate (N, V) scores in 0 to 1, not propagated, of the annotated proteins.

    ``known`` annotations count neither as annotated nor as predicted, and terms outside ``terms_V`` for no protein
    (partial knowledge); proteins that then have nothing left to predict leave the evaluation. Raises DataError where
    none is left, or where no score reaches a threshold.
    """
    if settings.orphans:
        judged_V = np.ones(len(aspect.terms), bool)
    else:
        judged_V = aspect.levels_V > 0
    weights = {"": judged_V.astype(float)} | ({} if accretion_V is None else {"_w": accretion_V})
    actual, excluded = truth.terms, None
    if terms_V is not None:
        weights = {name: weight_V * terms_V for name, weight_V in weights.items()}
    if known is not None:
        excluded = known.of(truth.proteins)
        actual = (actual > excluded).tocsr()
    if known is not None or terms_V is not None:
        left_N = actual @ weights[""] > 0
        actual, scores = actual[left_N], scores[left_N]
        excluded = None if excluded is None else excluded[left_N]
    if not actual.shape[0]:
        raise DataError(f"no protein has an annotation of {aspect.name} that was not known; check the known annotations")
    thresholds_T = np.arange(settings.step, 1, settings.step)
    counts = _count(aspect, actual, scores, excluded, weights, thresholds_T, settings.propagation)
    sums = {name: _sums(each, settings) for name, each in counts.items()}
    values = {
        key + name: value
        for name, summed in sums.items()
        for key, value in _normalised(summed, actual.shape[0], settings.norm).items()
    }
    covered_TR = values["cov"] > 0
    if not (some_T := covered_TR[:, 0]).any():
        raise DataError(f"no score of {aspect.name} reaches the first threshold, {settings.step:g}; check the scores")
    return Evaluation(
        proteins=actual.shape[0],
        predicted=int(np.count_nonzero(np.diff(scores.indptr))),
        thresholds_T=thresholds_T[some_T],
        curves={name: value_TR[some_T, 0] for name, value_TR in values.items()},
        metrics=dict(_metrics(values, list(weights), covered_TR, thresholds_T)),
    )


def _count(
    aspect: Aspect,
    actual: csr_array,
    scores: csr_array,
    excluded: csr_array | None,
    weights: Mapping[str, Array],
    thresholds_T: Array,
    propagation: Method,
) -> dict[str, _Counts]:
    """Counts of each weighting, some proteins at a time."""
    size, total = len(thresholds_T), actual.shape[0]
    # 0 is no score, 1 one below the first threshold, 2 one that reaches it, and so on
    reached = np.searchsorted(thresholds_T, scores.data, side="right") + (scores.data > 0)
    codes = csr_array((reached.astype(np.min_scalar_type(size + 1)), scores.indices, scores.indptr), shape=scores.shape)
    counts = {
        name: _Counts(np.empty((size, total)), np.empty((size, total)), actual @ weight_V)
        for name, weight_V in weights.items()
    }
    for start in range(0, total, BLOCK):
        rows = slice(start, min(start + BLOCK, total))
        codes_VB, actual_VB = dense(codes[rows]), dense(actual[rows])
        propagate_dense(codes_VB, aspect, propagation)
        if excluded is not None:
            codes_VB[dense(excluded[rows])] = 0
        term, protein = np.nonzero(codes_VB)
        key = protein * (size + 2) + codes_VB[term, protein]
        hit = actual_VB[term, protein]
        for name, weight_V in weights.items():
            weight = weight_V[term]
            counts[name].hit_TN[:, rows] = _reaching(key[hit], weight[hit], codes_VB.shape[1], size)
            counts[name].called_TN[:, rows] = _reaching(key, weight, codes_VB.shape[1], size)
    return counts


def _reaching(key: NDArray[np.int64], weight: Array, proteins: int, thresholds: int) -> Array:
    """(T, B) weight of the terms that reach each threshold."""
    histogram = np.bincount(key, weight, minlength=proteins * (thresholds + 2)).reshape(proteins, thresholds + 2)
    return histogram[:, :1:-1].cumsum(axis=1)[:, ::-1].T


def _sums(counts: _Counts, settings: Settings) -> dict[str, Array]:
    """(T, R) sums over proteins, and over those of each draw."""
    hit_TN, called_TN, truth_N = counts
    parts = {
        "n": (called_TN > 0).astype(float),
        "tp": hit_TN,
        "fp": called_TN - hit_TN,
        "fn": truth_N - hit_TN,
        "pr": _ratio(hit_TN, called_TN),
        "rc": _ratio(hit_TN, np.broadcast_to(truth_N, hit_TN.shape)),
    }
    sums = {name: [part_TN.sum(axis=1, keepdims=True)] for name, part_TN in parts.items()}
    for draws_NR in _draws(len(truth_N), settings):
        for name, part_TN in parts.items():
            sums[name].append(part_TN @ draws_NR)
    return {name: np.concatenate(some, axis=1) for name, some in sums.items()}


def _draws(proteins: int, settings: Settings) -> Iterator[Array]:
    """(N, some draws) how often each protein is drawn."""
    random = np.random.default_rng(settings.seed)
    for start in range(0, settings.draws, _DRAWS_AT_ONCE):
        number = min(_DRAWS_AT_ONCE, settings.draws - start)
        drawn = random.integers(proteins, size=(proteins, number)) * number + np.arange(number)
        yield np.bincount(drawn.ravel(), minlength=proteins * number).reshape(proteins, number).astype(float)


def _normalised(sums: dict[str, Array], proteins: int, norm: Normalisation) -> dict[str, Array]:
    """(T, R) values by cafaeval's names."""
    n_TR = sums.pop("n")
    all_TR = np.full_like(n_TR, proteins)
    found = {
        name: _ratio(sum_TR, n_TR if norm == "pred" or (norm == "cafa" and name == "pr") else all_TR)
        for name, sum_TR in sums.items()
    }
    micro = {
        "pr_micro": _ratio(found["tp"], found["tp"] + found["fp"]),
        "rc_micro": _ratio(found["tp"], found["tp"] + found["fn"]),
    }
    return {
        "n": n_TR,
        **found,
        "cov": n_TR / proteins,
        "mi": found["fp"],
        "ru": found["fn"],
        "f": _harmonic(found["pr"], found["rc"]),
        "s": np.sqrt(found["fn"] ** 2 + found["fp"] ** 2),
        **micro,
        "f_micro": _harmonic(**micro),
    }


def _harmonic(pr_micro: Array, rc_micro: Array) -> Array:
    return _ratio(2 * pr_micro * rc_micro, pr_micro + rc_micro)


def _ratio(above: Array, below: Array) -> Array:
    return np.divide(above, below, out=np.zeros_like(below), where=below > 0)


def _metrics(
    values: dict[str, Array], weightings: list[str], covered_TR: NDArray[np.bool_], thresholds_T: Array
) -> Iterator[tuple[str, Metric]]:
    """Best values and areas over the thresholds where a draw has predictions."""
    for weighting in weightings:
        for name, key in BEST.items():
            sign = -1 if name == "smin" else 1
            of_TR = np.where(covered_TR, sign * values[key + weighting], -np.inf)
            best_R = of_TR.max(axis=0)
            threshold = float(thresholds_T[of_TR[:, 0].argmax()])
            yield name + weighting, _metric(sign * best_R, threshold)
        for ending in ("", "_micro"):
            precision_TR, recall_TR = (values[f"{kind}{ending}{weighting}"] for kind in ("pr", "rc"))
            yield f"aupr{ending}{weighting}", _metric(_area(precision_TR, recall_TR, covered_TR))
        yield f"cov{weighting}", _metric(values[f"cov{weighting}"].max(axis=0))


def _metric(value_R: Array, threshold: float | None = None) -> Metric:
    draws = value_R[1:][np.isfinite(value_R[1:])]  # a draw may have no predictions
    low, high = np.percentile(draws, [2.5, 97.5]) if draws.size else (np.nan, np.nan)
    return Metric(float(value_R[0]), float(low), float(high), threshold)


def _area(precision_TR: Array, recall_TR: Array, covered_TR: NDArray[np.bool_]) -> Array:
    """(R,) area under the curve; thresholds without predictions repeat the last that has some, which adds no area."""
    last_R = np.maximum(covered_TR.sum(axis=0) - 1, 0)
    place_TR = np.minimum(np.arange(len(covered_TR))[::-1, None], last_R)
    precision_TR, recall_TR = (np.take_along_axis(each, place_TR, axis=0) for each in (precision_TR, recall_TR))
    order_TR = np.argsort(recall_TR, axis=0, kind="stable")
    precision_TR, recall_TR = (np.take_along_axis(each, order_TR, axis=0) for each in (precision_TR, recall_TR))
    return np.trapezoid(precision_TR, recall_TR, axis=0)
