"""Metrics equal scikit-learn's and SciPy's, weighted or not; intervals equal resampling of records."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from sklearn import metrics

from esmeray.common.errors import DivergenceError
from esmeray.dataset.targets import IGNORED_TARGET
from esmeray.model.metrics.classification import (
    bootstrap_intervals,
    classification_metrics,
    confusion_matrix,
    metrics_of_each,
)

KINDS = ("multiclass", "binary", "multilabel", "regression", "per_residue")
cases = given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(3, 70),
    classes=st.integers(2, 6),
    decimals=st.sampled_from([1, 8]),
    weighted=st.booleans(),
)
few = settings(max_examples=12, deadline=None)


def class_case(seed, rows, classes, decimals=8, occurring=None):
    """Random probabilities and targets. Few decimals cause ties; only the first ``occurring`` classes have targets."""
    generator = np.random.default_rng(seed)
    scores = generator.random((rows, classes)).round(decimals) + 1e-3
    targets = generator.integers(occurring or classes, size=rows)
    scores[np.arange(rows), targets] += generator.random(rows).round(decimals)
    return scores / scores.sum(axis=1, keepdims=True), targets


def label_case(seed, rows, labels, decimals=8):
    generator = np.random.default_rng(seed)
    targets = (generator.random((rows, labels)) < 0.4).astype(np.float64)
    scores = (0.6 * generator.random((rows, labels)) + 0.4 * targets * generator.random((rows, labels))).round(decimals)
    return scores, targets


def number_case(seed, rows, columns, decimals=8):
    generator = np.random.default_rng(seed)
    measured = generator.normal(5.0, 0.01, size=(rows, columns)).round(decimals + 2)
    return measured + generator.normal(0, 0.01, size=measured.shape).round(decimals + 2), measured


def case_of(kind, seed=0, rows=40, columns=4):
    if kind == "regression":
        return number_case(seed, rows, columns)
    if kind == "multilabel":
        return label_case(seed, rows, columns)
    return class_case(seed, rows, 2 if kind == "binary" else columns)


def assert_close(values, expected):
    assert values == pytest.approx(expected, abs=1e-6, nan_ok=False)


def weights_of(seed, rows, weighted):
    return np.random.default_rng(seed).random(rows) + 0.01 if weighted else None


def assert_rankings_of_scikit_learn(values, truth, scores, weights):
    present = [c for c in range(truth.shape[1]) if truth[:, c].any()]
    varying = [c for c in present if not truth[:, c].all()]
    for name, function, columns in (
        ("auroc", metrics.roc_auc_score, varying),
        ("average_precision", metrics.average_precision_score, present),
    ):
        per_class = [function(truth[:, c], scores[:, c], sample_weight=weights) for c in columns]
        assert_close(values.get(name), np.mean(per_class) if per_class else None)


@cases
@few
@pytest.mark.filterwarnings("ignore")
def test_metrics_of_classes_equal_scikit_learns(seed, rows, classes, decimals, weighted):
    scores, targets = class_case(seed, rows, classes, decimals, occurring=max(1, classes - seed % 2))
    weights = weights_of(seed, rows, weighted)
    predicted = scores.argmax(axis=1)
    kind = "binary" if classes == 2 else "multiclass"
    values = classification_metrics(kind, torch.from_numpy(scores), torch.from_numpy(targets), weights)
    assert_close(values["accuracy"], metrics.accuracy_score(targets, predicted, sample_weight=weights))
    assert_close(
        values["balanced_accuracy"], metrics.balanced_accuracy_score(targets, predicted, sample_weight=weights)
    )
    assert_close(values["mcc"], metrics.matthews_corrcoef(targets, predicted, sample_weight=weights))
    for average in ("macro", "micro"):
        assert_close(
            values[f"f1_{average}"], metrics.f1_score(targets, predicted, average=average, sample_weight=weights)
        )
    first = 1 if kind == "binary" else 0
    assert_rankings_of_scikit_learn(values, np.eye(classes)[targets][:, first:], scores[:, first:], weights)


@cases
@few
@pytest.mark.filterwarnings("ignore")
def test_metrics_of_labels_equal_scikit_learns(seed, rows, classes, decimals, weighted):
    scores, targets = label_case(seed, rows, classes, decimals)
    weights = weights_of(seed, rows, weighted)
    if seed % 3 == 0:
        targets[:, 0] = 0
    predicted = scores > 0.5
    values = classification_metrics("multilabel", scores, targets, weights)
    assert_close(values["accuracy"], metrics.accuracy_score(targets, predicted, sample_weight=weights))
    for average in ("macro", "micro"):
        if average == "macro" or targets.any() or predicted.any():
            expected = metrics.f1_score(targets, predicted, average=average, zero_division=0, sample_weight=weights)
            assert_close(values[f"f1_{average}"], expected)
    assert_rankings_of_scikit_learn(values, targets, scores, weights)


@cases
@few
def test_metrics_of_numbers_equal_scikit_learns_and_scipys(seed, rows, classes, decimals, weighted):
    predicted, measured = number_case(seed, rows, classes, decimals=2 if decimals == 1 else 8)
    weights = weights_of(seed, rows, weighted)
    values = classification_metrics("regression", predicted, measured, weights)
    assert_close(values["mse"], metrics.mean_squared_error(measured, predicted, sample_weight=weights))
    assert_close(values["mae"], metrics.mean_absolute_error(measured, predicted, sample_weight=weights))
    varying = [c for c in range(classes) if np.ptp(measured[:, c]) > 0 and np.ptp(predicted[:, c]) > 0]
    for name, function in (("spearman", spearmanr), ("pearson", pearsonr)) if not weighted else ():
        correlations = [function(predicted[:, c], measured[:, c]).statistic for c in varying]
        assert_close(values.get(name), np.mean(correlations) if correlations else None)
    if len(varying) == classes:
        expected = metrics.r2_score(measured, predicted, sample_weight=weights)
        assert values["r2"] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_calibration_error_is_the_gap_of_each_bin_by_its_share():
    scores, targets = class_case(0, 60, 3, decimals=1)
    confidences, right = scores.max(axis=1), scores.argmax(axis=1) == targets
    bins = np.digitize(confidences, np.linspace(0, 1, 16))
    gaps = [(right - confidences)[bins == number].sum() for number in np.unique(bins)]
    assert_close(classification_metrics("multiclass", scores, targets)["ece"], np.abs(gaps).sum() / 60)


@pytest.mark.parametrize("seed", range(2))
def test_fmax_equals_cafas(seed):
    """Radivojac et al. 2013: mean precision over records with a prediction, mean recall over records with a label."""
    scores, targets = label_case(seed, 30, 4, 2 if seed else 8)
    targets[0] = 0
    targets[1, 0] = 1
    targets[-1, -1] = np.nan
    best = 0.0
    annotated = (targets == 1).any(axis=1)
    truth = targets[annotated] == 1
    for step in range(1, 101):
        predicted = (np.float32(scores) >= np.float32(step / 100))[annotated] & np.isfinite(targets[annotated])
        hits, covered = (predicted & truth).sum(axis=1), predicted.any(axis=1)
        precision = (hits[covered] / predicted[covered].sum(axis=1)).mean() if covered.any() else 0.0
        recall = (hits / truth.sum(axis=1)).mean()
        best = max(best, 2 * precision * recall / max(precision + recall, 1e-9))
    assert_close(classification_metrics("multilabel", scores, targets)["fmax"], best)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_of_weight_two_counts_as_two_records(kind):
    predictions, targets = case_of(kind)
    weights = np.random.default_rng(0).integers(0, 4, size=len(targets))
    weighted = classification_metrics(kind, predictions, targets, weights)
    repeated = classification_metrics(kind, predictions.repeat(weights, axis=0), targets.repeat(weights, axis=0))
    assert weighted == pytest.approx(repeated, abs=1e-6)
    expected = classification_metrics(kind, predictions, targets)
    unknown = np.full_like(targets[:7], np.nan if targets.ndim == 2 else IGNORED_TARGET)
    mixed = np.concatenate([unknown, targets])
    assert classification_metrics(kind, np.concatenate([predictions[:7], predictions]), mixed) == expected
    assert classification_metrics(kind, predictions[:7], unknown) == {}


def test_unknown_labels_and_numbers_are_left_out_one_by_one():
    scores, targets = label_case(0, 30, 3)
    targets[:10, 1] = np.nan
    label = metrics_of_each("multilabel", scores, targets)[1]
    assert label["records"] == targets[10:, 1].sum()
    assert_close(label["auroc"], metrics.roc_auc_score(targets[10:, 1], scores[10:, 1]))
    numbers, measured = number_case(0, 30, 2)
    measured[:10, 1] = np.nan
    number = metrics_of_each("regression", numbers, measured)[1]
    assert_close(number["r2"], metrics.r2_score(measured[10:, 1], numbers[10:, 1]))


@pytest.mark.parametrize("kind", KINDS)
def test_undefined_metrics_are_left_out_and_none_is_nan(kind):
    columns = 2 if kind == "binary" else 3
    by_number = kind in ("multilabel", "regression")
    for rows, value in ((1, 0), (1, 1), (9, 0), (9, 1)):
        constant = np.full((rows, columns), 1 / columns)
        targets = np.full((rows, columns), float(value)) if by_number else np.full(rows, value)
        values = classification_metrics(kind, constant, targets)
        assert np.isfinite(list(values.values())).all() and values.get("mcc", 0) == 0
        assert not {"auroc", "spearman", "pearson", "r2"} & set(values)
        intervals = bootstrap_intervals(kind, constant, targets, samples=20, seed=0)
        assert np.isfinite(list(intervals.values())).all()
        assert set(intervals) <= set(values)


def test_a_prediction_of_nan_is_refused():
    with pytest.raises(DivergenceError, match="1 of 2 records are NaN"):
        classification_metrics("binary", np.array([[0.5, 0.5], [np.nan, 0.5]]), np.array([0, 1]))
    with pytest.raises(ValueError, match="not probabilities"):
        classification_metrics("binary", np.array([[-3.0, 4.0]]), np.array([0]))


def test_metrics_of_each_class_equal_scikit_learns():
    scores, targets = class_case(2, 60, 4)
    per_class = metrics_of_each("multiclass", scores, targets)
    expected = metrics.confusion_matrix(targets, scores.argmax(axis=1))
    np.testing.assert_array_equal(confusion_matrix(scores, targets), expected)
    precision, recall, f1, records = metrics.precision_recall_fscore_support(targets, scores.argmax(axis=1))
    for c, values in enumerate(per_class):
        expected = {"precision": precision[c], "recall": recall[c], "f1": f1[c], "records": records[c]}
        assert {name: values[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interval_holds_the_metrics_of_resampled_records(kind):
    predictions, targets = case_of(kind, seed=2)
    generator = np.random.default_rng(11)
    draws = [generator.integers(len(targets), size=len(targets)) for _ in range(20)]
    resampled = [classification_metrics(kind, predictions[drawn], targets[drawn]) for drawn in draws]
    intervals = bootstrap_intervals(kind, predictions, targets, samples=20, seed=11)
    assert set(intervals) == set(classification_metrics(kind, predictions, targets))
    for name, interval in intervals.items():
        values = [metrics[name] for metrics in resampled]
        assert interval == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])), abs=1e-6)


def test_residues_are_drawn_by_whole_records():
    right = np.repeat(np.random.default_rng(0).random(40) < 0.5, 25)
    scores, targets = np.eye(2)[right.astype(int)], np.ones(1000, int)
    records = np.repeat(np.arange(40), 25)
    alone = bootstrap_intervals("per_residue", scores, targets, samples=200, seed=0)["accuracy"]
    together = bootstrap_intervals("per_residue", scores, targets, samples=200, seed=0, groups=records)["accuracy"]
    assert (together[1] - together[0]) > 3 * (alone[1] - alone[0])
