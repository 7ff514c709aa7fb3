"""Baselines of a classifier: guesses from the training labels only, and linear models of simple counts.

Inputs are the texts and targets of training records, and the texts to predict. Outputs are probabilities (numbers for
regression) by baseline name, with the shape of a model's predictions, so that the same metrics apply.

    majority class, or mean             shares of the training labels (for multilabel, of each label), or their mean
    logistic regression on composition  proteins: shares of the 20 amino acids and the log length, standardized
    logistic regression on TF-IDF       text: words and pairs of words, with sublinear counts
    class of the residue                per_residue: shares of the training labels of the same amino acid

Regression uses ridge regression instead of logistic regression. Several labels or columns are fitted separately.

Shape legend: N records, R concatenated residues of all records, C classes, labels or columns.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.section import TargetKind
from esmeray.dataset.targets import has_target

_BY_COLUMN = ("multilabel", "regression")
_WORD = r"\b\w+\b"


def baselines(
    kind: TargetKind,
    content: Literal["protein", "text"],
    training_texts: Sequence[str],
    training_targets: NDArray,
    texts: Sequence[str],
    num_outputs: int,
) -> dict[str, NDArray[np.float32]]:
    """Predict with each baseline: (N, C) float32, or (R, C) for per_residue, by baseline name.

    Texts are residues in upper case, or text. Targets are in a model's format:

    - (N,) classes, with IGNORED_TARGET if missing
    - (N, C) numbers, with NaN if unknown
    - (R,) classes of the concatenated residues of the training texts

    C is ``num_outputs``, even if some of them don't occur in training.
    """
    if kind == "per_residue":
        return _residue_baselines(training_texts, training_targets, texts, num_outputs)
    known_N = has_target(training_targets)
    targets = training_targets[known_N]
    known_texts = [text for text, known in zip(training_texts, known_N.tolist(), strict=True) if known]
    guess = np.tile(_guess(kind, targets, num_outputs), (len(texts), 1))
    results = {"mean" if kind == "regression" else "majority class": guess}
    of_one_class = kind not in _BY_COLUMN and len(np.unique(targets)) < 2
    if of_one_class or (content == "text" and not any(re.search(_WORD, text) for text in known_texts)):
        return results  # nothing can be fitted
    if content == "text":
        # A weak penalty (C = 20): TF-IDF rows have length 1, so that single values are small.
        words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=_WORD)
        features, name, strength = (words.fit_transform(known_texts), words.transform(texts)), "TF-IDF", 20.0
    else:
        features, name, strength = (composition(known_texts), composition(texts)), "composition", 1.0
    model: Any = LogisticRegression(C=strength, max_iter=2000)
    linear = "logistic regression"
    if kind == "regression":
        model, linear = Ridge(), "ridge regression"
    if content != "text":  # TF-IDF values have a common scale already
        model = make_pipeline(StandardScaler(), model)
    results[f"{linear} on {name}"] = _fitted(model, kind, features, targets, guess)
    return results


def composition(sequences: Sequence[str]) -> NDArray[np.float64]:
    """(N, 21) shares of the 20 amino acids among all residues, and the natural logarithm of the length."""
    letters = np.frombuffer(AMINO_ACIDS.encode("ascii"), dtype=np.uint8)
    # Counted as bytes, because one bincount per sequence is a single pass. Other letters are ignored.
    counts = np.stack([np.bincount(_codes(sequence), minlength=256)[letters] for sequence in sequences])
    lengths_N = np.array([max(len(sequence), 1) for sequence in sequences], dtype=np.float64)
    return np.column_stack([counts / lengths_N[:, None], np.log(lengths_N)])


def _guess(kind: TargetKind, targets: NDArray, num_outputs: int) -> NDArray[np.float32]:
    """(C,) shares of the classes, or means of the columns; 0 for a column without numbers."""
    if kind in _BY_COLUMN:
        known_NC = np.isfinite(targets)
        sums_C = np.where(known_NC, targets, 0.0).sum(axis=0, dtype=np.float64)
        return (sums_C / np.maximum(known_NC.sum(axis=0), 1)).astype(np.float32)
    counts_C = np.bincount(targets, minlength=num_outputs)
    return (counts_C / max(counts_C.sum(), 1)).astype(np.float32)


def _fitted(
    estimator: Any, kind: TargetKind, features: tuple[Any, Any], targets: NDArray, guess: NDArray[np.float32]
) -> NDArray[np.float32]:
    """(N, C) predictions for the second features after fitting to the first; the guess for constant targets."""
    training, wanted = features
    if kind not in _BY_COLUMN:
        estimator.fit(training, targets)
        result = np.zeros_like(guess)
        # Columns follow the label space: a class that training lacks keeps 0.
        result[:, estimator.classes_] = estimator.predict_proba(wanted)
        return result
    result = guess.copy()
    for column, target_N in enumerate(targets.T):
        known = np.flatnonzero(np.isfinite(target_N))
        if len(np.unique(target_N[known])) < 2:  # logistic regression rejects a single class
            continue
        estimator.fit(training[known], target_N[known])
        result[:, column] = estimator.predict(wanted) if kind == "regression" else estimator.predict_proba(wanted)[:, 1]
    return result


def _residue_baselines(
    training_texts: Sequence[str], training_targets: NDArray, texts: Sequence[str], num_outputs: int
) -> dict[str, NDArray[np.float32]]:
    training_R, wanted_R = _codes("".join(training_texts)), _codes("".join(texts))
    known_R = has_target(training_targets)
    guess_C = _guess("per_residue", training_targets[known_R], num_outputs)
    # One code per pair of letter and class, so that a single bincount gives the table of counts.
    cells = training_R[known_R] * num_outputs + training_targets[known_R]
    counts = np.bincount(cells, minlength=256 * num_outputs).reshape(256, num_outputs)
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.where(totals > 0, counts / np.maximum(totals, 1), guess_C).astype(np.float32)
    return {"majority class": np.tile(guess_C, (len(wanted_R), 1)), "class of the residue": shares[wanted_R]}


def _codes(sequence: str) -> NDArray[np.int64]:
    """(R,) byte of each residue."""
    return np.frombuffer(sequence.encode("latin-1", errors="replace"), dtype=np.uint8).astype(np.int64)
