"""What a classifier has to beat: guesses from the training labels alone, and linear models of simple counts.

In: texts and targets of the training records, and the texts to predict. Out: probabilities (numbers, for regression) by
the name of the baseline, shaped like a model's, so that the same figures are computed for both.

    majority class, or mean             shares of the training labels (multilabel: of each label), or their mean
    logistic regression on composition  proteins: shares of the 20 amino acids and the log of the length, standardised
    logistic regression on TF-IDF       text: words and pairs of words, with sublinear counts
    SVM on composition and ends         proteins, when asked: the same of the whole, and shares of both ends
    class of the residue                per_residue: shares of the training labels of the same amino acid

Regression has ridge regression in place of logistic regression. Several labels or columns are fitted one by one.

Shape legend: N records, R residues of all records end to end, C classes, labels or columns, F features.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.calibration import CalibratedClassifierCV
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR

from dataset.fasta.alphabet import AMINO_ACIDS
from dataset.labels.label_space import IGNORED_TARGET
from train_config.classifier_schema import TargetKind

MAJORITY, MEAN = "majority class", "mean"
END_RESIDUES = 50
"""Residues of each end whose composition the SVM sees: signal peptides lie there."""
_TEXT_REGULARISATION = 20.0
_WORD = r"\b\w+\b"
_ITERATIONS = 2000
_FOLDS = 5

Features: TypeAlias = NDArray[np.float64] | csr_matrix


def baselines(
    kind: TargetKind,
    content: Literal["protein", "text"],
    training_texts: Sequence[str],
    training_targets: NDArray,
    texts: Sequence[str],
    num_outputs: int,
    *,
    svm: bool = False,
) -> dict[str, NDArray[np.float32]]:
    """Predictions of each baseline that the kind and the content have.

    Args:
        kind: of the targets.
        content: what the texts are.
        training_texts: residues in upper case, or text.
        training_targets: as of a model: (N,) classes with IGNORED_TARGET where there is none, (N, C) numbers with NaN
            where unknown, or (R,) classes of all residues of the training texts end to end.
        texts: to predict.
        num_outputs: C, whether or not all of them occur in training.
        svm: whether to fit the SVM, which takes some seconds for thousands of proteins.

    Returns:
        (N, C) by name, or (R, C) for per_residue.
    """
    if kind == "per_residue":
        return _residue_baselines(training_texts, training_targets, texts, num_outputs)
    known_N = np.isfinite(training_targets).any(axis=1) if kind in _BY_COLUMN else training_targets != IGNORED_TARGET
    targets = training_targets[known_N]
    learnt = [text for text, known in zip(training_texts, known_N.tolist(), strict=True) if known]
    guess_C = _guess(kind, targets, num_outputs)
    results = {MEAN if kind == "regression" else MAJORITY: np.tile(guess_C, (len(texts), 1))}
    if kind not in _BY_COLUMN and len(np.unique(targets)) < 2:
        return results  # no model can be fitted, and what it would say is the majority
    linear = "ridge regression" if kind == "regression" else "logistic regression"
    if content == "text":
        if not any(re.search(_WORD, text) for text in learnt):
            return results
        features = _tf_idf(learnt, texts)
        results[f"{linear} on TF-IDF"] = _fitted(kind, _linear(kind, sparse=True), features, targets, guess_C)
        return results
    features = composition(learnt), composition(texts)
    results[f"{linear} on composition"] = _fitted(kind, _linear(kind, sparse=False), features, targets, guess_C)
    if svm:
        features = composition_and_ends(learnt), composition_and_ends(texts)
        results["SVM on composition and ends"] = _fitted(kind, _svm(kind), features, targets, guess_C)
    return results


def composition(sequences: Sequence[str]) -> NDArray[np.float64]:
    """(N, 21): shares of the 20 amino acids among all residues, and the natural logarithm of the length."""
    lengths_N = np.array([max(len(sequence), 1) for sequence in sequences], dtype=np.float64)
    return np.column_stack([_shares(sequences), np.log(lengths_N)])


def composition_and_ends(sequences: Sequence[str]) -> NDArray[np.float64]:
    """(N, 61): :func:`composition`, and shares of the amino acids among the first and the last residues."""
    starts = [sequence[:END_RESIDUES] for sequence in sequences]
    ends = [sequence[-END_RESIDUES:] for sequence in sequences]
    return np.hstack([composition(sequences), _shares(starts), _shares(ends)])


_BY_COLUMN = ("multilabel", "regression")


def _guess(kind: TargetKind, targets: NDArray, num_outputs: int) -> NDArray[np.float32]:
    """(C,) what is best said of every record without looking at it; of a column that nobody knows, 0."""
    if kind in _BY_COLUMN:
        known_NC = np.isfinite(targets)
        sums_C = np.where(known_NC, targets, 0.0).sum(axis=0, dtype=np.float64)
        return (sums_C / np.maximum(known_NC.sum(axis=0), 1)).astype(np.float32)
    counts_C = np.bincount(targets, minlength=num_outputs)
    return (counts_C / max(counts_C.sum(), 1)).astype(np.float32)


def _fitted(
    kind: TargetKind,
    model: Callable[[NDArray], Any],
    features: tuple[Features, Features],
    targets: NDArray,
    guess_C: NDArray[np.float32],
) -> NDArray[np.float32]:
    """(N, C) what a model that learns from the first features says of the second ones.

    Args:
        kind: of the targets.
        model: makes an estimator for training targets.
        features: of the training records and of those to predict.
        targets: of the training records.
        guess_C: what is said where there is nothing to learn.
    """
    learnt, asked = features
    result = np.tile(guess_C, (asked.shape[0], 1))
    if kind not in _BY_COLUMN:
        estimator = model(targets).fit(learnt, targets)
        result[:] = 0.0
        result[:, estimator.classes_] = _probabilities(estimator, asked)
        return result
    for column, target_N in enumerate(targets.T):
        known = np.flatnonzero(np.isfinite(target_N))
        known_target = target_N[known] if kind == "regression" else target_N[known].astype(np.int64)
        if len(np.unique(known_target)) < 2:
            continue
        estimator = model(known_target).fit(learnt[known], known_target)
        predicted = estimator.predict(asked) if kind == "regression" else _probabilities(estimator, asked)[:, 1]
        result[:, column] = predicted
    return result


def _linear(kind: TargetKind, sparse: bool) -> Callable[[NDArray], Any]:
    """Of sparse features, which are of one scale already, the scale is kept."""
    if kind == "regression":
        return lambda _: Ridge() if sparse else make_pipeline(StandardScaler(), Ridge())
    if sparse:
        return lambda _: LogisticRegression(C=_TEXT_REGULARISATION, max_iter=_ITERATIONS)
    return lambda _: make_pipeline(StandardScaler(), LogisticRegression(max_iter=_ITERATIONS))


def _svm(kind: TargetKind) -> Callable[[NDArray], Any]:
    """An SVM with a Gaussian kernel; its margins become probabilities as in Platt 1999, by cross-validation."""
    if kind == "regression":
        return lambda _: make_pipeline(StandardScaler(), SVR())
    return _classifying_svm


def _classifying_svm(targets: NDArray) -> Any:
    folds = min(_FOLDS, int(np.unique_counts(targets).counts.min()))
    machine = make_pipeline(StandardScaler(), SVC())
    if folds < 2:  # a class of one record can't be left out of the training
        return machine
    return CalibratedClassifierCV(machine, method="sigmoid", cv=folds, ensemble=False)


def _probabilities(estimator: Any, features: Features) -> NDArray[np.float64]:
    """(N, C) probabilities; of an estimator that has margins alone, their softmax."""
    if hasattr(estimator, "predict_proba"):
        return estimator.predict_proba(features)
    margins = estimator.decision_function(features)
    if margins.ndim == 1:
        margins = np.column_stack([-margins / 2, margins / 2])
    powers = np.exp(margins - margins.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _tf_idf(training_texts: Sequence[str], texts: Sequence[str]) -> tuple[csr_matrix, csr_matrix]:
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=_WORD)
    return vectorizer.fit_transform(training_texts), vectorizer.transform(texts)


def _residue_baselines(
    training_texts: Sequence[str], training_targets: NDArray, texts: Sequence[str], num_outputs: int
) -> dict[str, NDArray[np.float32]]:
    learnt_R, asked_R = _codes("".join(training_texts)), _codes("".join(texts))
    known_R = training_targets != IGNORED_TARGET
    guess_C = _guess("per_residue", training_targets[known_R], num_outputs)
    counts = np.bincount(learnt_R[known_R] * num_outputs + training_targets[known_R], minlength=256 * num_outputs)
    counts = counts.reshape(256, num_outputs)
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.where(totals > 0, counts / np.maximum(totals, 1), guess_C).astype(np.float32)
    return {MAJORITY: np.tile(guess_C, (len(asked_R), 1)), "class of the residue": shares[asked_R]}


def _shares(sequences: Sequence[str]) -> NDArray[np.float64]:
    """(N, 20) shares of the amino acids among all residues; zeros for an empty sequence."""
    letters = np.frombuffer(AMINO_ACIDS.encode("ascii"), dtype=np.uint8)
    counts = np.stack([np.bincount(_codes(sequence), minlength=256)[letters] for sequence in sequences])
    return counts / np.array([[max(len(sequence), 1)] for sequence in sequences], dtype=np.float64)


def _codes(sequence: str) -> NDArray[np.int64]:
    """(R,) byte of each residue."""
    return np.frombuffer(sequence.encode("latin-1", errors="replace"), dtype=np.uint8).astype(np.int64)
