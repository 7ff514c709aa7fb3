"""CAFA evaluation of predicted terms against annotations.

In: annotations and scores of proteins. Out: curves over thresholds as reported by cafaeval 1.3, under its names (or by
CAFA 6's evaluator if some annotations are known before), and best values with 95 % bootstrap intervals over proteins.
Each score is stored as the number of thresholds it reaches. A histogram of these counts per protein gives all
thresholds at once, and a bootstrap draw is a weighting of the proteins.

Names:
- ``n``: proteins with predictions.
- ``tp``, ``fp``, ``fn``: terms per protein.
- ``pr``, ``rc``, ``f``: precision, recall and their harmonic mean, averaged over proteins; with ``_micro`` computed
  from summed terms.
- ``mi``, ``ru``, ``s``: misinformation, remaining uncertainty and their distance from the origin (Clark and Radivojac
  2013).
- ``cov``: coverage.
- Names that end in ``_w`` weight a term by its information accretion.

Shape legend: N proteins, V terms, W weightings, T thresholds, B proteins of a block, R draws (the first is all proteins
once).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from esmeray.common.arguments import checked_arguments
from esmeray.common.errors import DataError
from esmeray.common.statistics import (
    RESAMPLINGS,
    counts_reaching,
    f_measure,
    percentile_interval,
    ratio,
    resamplings,
)
from esmeray.function.annotations import Annotations
from esmeray.function.ontology import BLOCK, Aspect, Method, dense, propagate_dense
from esmeray.function.section import EvaluationSection, Normalisation
from esmeray.train_config.section import NonNegativeInt

Array: TypeAlias = NDArray[np.float64]
BEST = {"fmax": ("f", 1), "fmax_micro": ("f_micro", 1), "smin": ("s", -1)}
_DRAWS_AT_ONCE = 128


class Metric(NamedTuple):
    """A value, the ends of its 95 % interval, and, for a best value, the threshold that reaches it."""

    value: float
    interval: tuple[float, float] | None
    threshold: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of one aspect.

    Attributes:
        proteins: number that recall averages over: annotated proteins with something left to predict.
        predicted: annotated proteins with any score; may exceed ``proteins`` if some have nothing left to predict.
        thresholds: thresholds at which any protein has a prediction.
        curves: (T,) values by name.
        metrics: best values and areas by name: ``fmax``, ``smin``, ``aupr`` (area under the precision-recall curve by
            the trapezoid rule, extended to recall 0 at the precision of its first point, so that a perfect ranking has
            1), ``cov``.
    """

    proteins: int
    predicted: int
    thresholds: Array
    curves: dict[str, Array]
    metrics: dict[str, Metric]


@checked_arguments
def evaluate_functions(
    aspect: Aspect,
    truth: Annotations,
    scores: csr_array,
    *,
    accretion_V: Array | None = None,
    known: Annotations | None = None,
    terms_V: NDArray[np.bool_] | None = None,
    settings: EvaluationSection | None = None,
    draws: NonNegativeInt = RESAMPLINGS,
) -> Evaluation:
    """Evaluate (N, V) scores in 0 to 1, not propagated, of the annotated proteins.

    ``known`` annotations count neither as annotated nor as predicted. Terms outside ``terms_V`` are ignored for all
    proteins (partial knowledge). Averages are not divided by proteins that then have nothing left to predict, but
    predictions for them still count (the rules of CAFA 5 and 6): coverage may exceed 1. If no protein has something
    left, or no score reaches a threshold, there are no metrics. ``draws`` is the number of bootstrap samples of
    proteins for the intervals; without draws there are none.

    >>> evaluation = esmeray.evaluate_functions(ontology.aspects[name], truth[name], scores[name])
    >>> 0 < evaluation.metrics["fmax"].value <= 1
    True
    """
    shape = len(truth.proteins), len(aspect.terms)
    is_share = np.abs(scores.data - 0.5) <= 0.5 + 1e-6  # sums of shares may exceed 1 by rounding; NaN fails
    if not scores.shape == truth.terms.shape == shape or not is_share.all():
        raise DataError(f"scores: expected values from 0 to 1 for {shape[0]:,} proteins by {shape[1]:,} terms")
    settings = settings or EvaluationSection()
    weights = {"": (settings.orphans | (aspect.levels > 0)).astype(float)}
    if accretion_V is not None:
        weights["_w"] = accretion_V
    weights_WV = np.stack(list(weights.values())) * (True if terms_V is None else terms_V)
    actual = truth.terms
    excluded = csr_array(truth.terms.shape, dtype=bool)
    if known is not None:
        excluded = known.of(truth.proteins)
        actual = (actual > excluded).tocsr()
    counts_N = np.ones(actual.shape[0], bool)
    if known is not None or terms_V is not None:
        # Without these settings all proteins count, also proteins whose only terms are roots that do not count.
        counts_N = actual @ weights_WV[0] > 0
    if not counts_N.any():
        return Evaluation(0, 0, np.empty(0), {}, {})
    thresholds_T = np.arange(settings.step, 1, settings.step)
    hits_WTN, predicted_WTN = _count(aspect, actual, scores, excluded, weights_WV, thresholds_T, settings.propagation)
    values = _normalised(_sums(hits_WTN, predicted_WTN, (actual @ weights_WV.T).T, counts_N, draws), settings.norm)
    covered_T = values["cov"][0, :, 0] > 0  # draw 0 is all proteins once
    return Evaluation(
        proteins=int(counts_N.sum()),
        predicted=int(np.count_nonzero(np.diff(scores.indptr))),
        thresholds=thresholds_T[covered_T],
        curves={name + end: values[name][w, covered_T, 0] for w, end in enumerate(weights) for name in values},
        metrics=dict(_metrics(values, list(weights), thresholds_T)) if covered_T.any() else {},
    )


def _count(
    aspect: Aspect,
    actual: csr_array,
    scores: csr_array,
    excluded: csr_array,
    weights_WV: Array,
    thresholds_T: Array,
    propagation: Method,
) -> tuple[Array, Array]:
    """Return (W, T, N) weights of predicted terms that are annotated, and of all predicted terms."""
    size, total = len(thresholds_T), actual.shape[0]
    # Code 0: no score; 1: below the first threshold; 2: reaches the first threshold, and so on. Codes keep the order of
    # the scores, so propagating codes propagates the scores. They take a byte each for up to 254 thresholds.
    reached = np.searchsorted(thresholds_T, scores.data, side="right") + (scores.data > 0)
    codes = csr_array((reached.astype(np.min_scalar_type(size + 1)), scores.indices, scores.indptr), shape=scores.shape)
    hits_WTN, predicted_WTN = np.empty((2, len(weights_WV), size, total))
    # In blocks: the matrix of proteins by terms is dense here, gigabytes for all proteins at once.
    for start in range(0, total, BLOCK):
        rows = slice(start, min(start + BLOCK, total))
        codes_VB = dense(codes[rows])
        propagate_dense(codes_VB, aspect, propagation)
        # After propagation: a known term still passes its score to its ancestors.
        codes_VB[dense(excluded[rows])] = 0
        term, protein = np.nonzero(codes_VB)
        reached, shape = codes_VB[term, protein].astype(np.int64) - 1, (codes_VB.shape[1], size)
        hit = dense(actual[rows])[term, protein]
        for w, weight_V in enumerate(weights_WV):
            weight = weight_V[term]
            hits_WTN[w, :, rows] = counts_reaching(protein[hit], reached[hit], shape, weight[hit]).T
            predicted_WTN[w, :, rows] = counts_reaching(protein, reached, shape, weight).T
    return hits_WTN, predicted_WTN


def _sums(
    hits_WTN: Array,
    predicted_WTN: Array,
    truth_WN: Array,
    counts_N: NDArray[np.bool_],
    draws: int,
) -> dict[str, Array]:
    """Return (W, T, R) sums over all proteins and over each draw; ``proteins`` is (1, 1, R)."""
    truth_WTN = np.broadcast_to(truth_WN[:, None], hits_WTN.shape)
    by_protein = {
        "proteins": counts_N[None, None].astype(float),  # the number of counted proteins differs between draws
        "n": (predicted_WTN > 0).astype(float),
        "tp": hits_WTN,
        "fp": predicted_WTN - hits_WTN,
        "fn": truth_WTN - hits_WTN,
        "pr": ratio(hits_WTN, predicted_WTN),
        "rc": ratio(hits_WTN, truth_WTN),
    }
    sums = {name: [values_WTN.sum(axis=2, keepdims=True)] for name, values_WTN in by_protein.items()}
    samples = resamplings(truth_WN.shape[1], draws, seed=0)
    # A draw's sums are a product with the number of times it has each protein; in groups of draws, to bound memory.
    for _ in range(0, draws, _DRAWS_AT_ONCE):
        draws_NR = np.stack(list(islice(samples, _DRAWS_AT_ONCE)), axis=1).astype(float)
        for name, values_WTN in by_protein.items():
            sums[name].append(values_WTN @ draws_NR)
    return {name: np.concatenate(blocks, axis=2) for name, blocks in sums.items()}


def _normalised(sums: dict[str, Array], norm: Normalisation) -> dict[str, Array]:
    """Return (W, T, R) values by cafaeval's names."""
    n = sums.pop("n")
    proteins = sums.pop("proteins")
    # Norms as in cafaeval: "cafa" divides precision by the predicted proteins and everything else by the counted ones,
    # "pred" divides both by the predicted, "gt" both by the counted proteins.
    divisor = n if norm == "pred" else proteins
    values = {name: ratio(summed, divisor) for name, summed in sums.items()}
    values["pr"] = ratio(sums["pr"], proteins if norm == "gt" else n)
    tp, fp, fn = (values[name] for name in ("tp", "fp", "fn"))
    values |= {"n": n, "cov": ratio(n, proteins), "mi": fp, "ru": fn, "s": np.sqrt(fn**2 + fp**2)}
    values |= {"pr_micro": ratio(tp, tp + fp), "rc_micro": ratio(tp, tp + fn)}
    for end in ("", "_micro"):
        values[f"f{end}"] = f_measure(values[f"pr{end}"], values[f"rc{end}"])
    return values


def _metrics(values: dict[str, Array], endings: list[str], thresholds_T: Array) -> Iterator[tuple[str, Metric]]:
    """Yield best values and areas over the thresholds at which a draw has predictions."""
    covered_TR = values["cov"][0] > 0
    for w, end in enumerate(endings):
        for name, (key, sign) in BEST.items():
            # Without predictions, S is the value of predicting nothing, which may be the smallest.
            signed_TR = np.where(covered_TR, sign * values[key][w], -np.inf)
            yield name + end, _metric(sign * signed_TR.max(axis=0), float(thresholds_T[signed_TR[:, 0].argmax()]))
        for kind in ("", "_micro"):
            yield (
                f"aupr{kind}{end}",
                _metric(_area(values[f"pr{kind}"][w], values[f"rc{kind}"][w], values["cov"][w] > 0)),
            )
        yield f"cov{end}", _metric(values["cov"][w].max(axis=0))


def _metric(value_R: Array, threshold: float | None = None) -> Metric:
    return Metric(float(value_R[0]), percentile_interval(value_R[1:]), threshold)


def _area(precision_TR: Array, recall_TR: Array, covered_TR: NDArray[np.bool_]) -> Array:
    """Return the (R,) area under the curve; thresholds without predictions add no area."""
    last_R = np.maximum(covered_TR.sum(axis=0) - 1, 0)
    threshold_TR = np.minimum(np.arange(len(covered_TR))[::-1, None], last_R)
    curve_2TR = np.take_along_axis(np.stack([precision_TR, recall_TR]), threshold_TR[None], axis=1)
    # Sorted by recall, which may rise with the threshold if the divisor is the number of predicted proteins.
    precision_TR, recall_TR = np.take_along_axis(curve_2TR, np.argsort(curve_2TR[1:], axis=1, kind="stable"), axis=1)
    # Left of the first point, precision equals the first point's: a perfect ranking may have no other point.
    return np.asarray(np.trapezoid(precision_TR, recall_TR, axis=0) + precision_TR[0] * recall_TR[0])
