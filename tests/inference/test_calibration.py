import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, softmax

from esmeray.inference.calibration import fit, quantiles, set_metrics
from esmeray.model.metrics.classification import classification_metrics

KINDS = ("multiclass", "multilabel", "regression", "per_residue")


def drawn(kind: str, records: int, seed: int, sharpened: float = 1.0):
    """Predictions and targets drawn from them, and the record of each row; residues of a record are alike."""
    random = np.random.default_rng(seed)
    rows = np.repeat(np.arange(records), random.integers(1, 30, records) if kind == "per_residue" else 1)
    logits = random.normal(size=(records, 4))[rows] * 2
    if kind == "regression":
        return logits, logits + random.normal(size=logits.shape) * [1, 2, 3, 4], rows
    if kind == "multilabel":
        return expit(logits * sharpened), (random.random(logits.shape) < expit(logits)).astype(np.float32), rows
    targets = (random.gumbel(size=(records, 4))[rows] + logits).argmax(axis=1)
    return softmax(logits * sharpened, axis=1), targets, rows


@pytest.mark.parametrize("kind", ["multiclass", "multilabel", "per_residue"])
def test_a_temperature_undoes_sharpening_and_keeps_the_labels(kind):
    predicted, targets, _ = drawn(kind, 3000, seed=1, sharpened=3.0)
    calibrated = fit(kind, *drawn(kind, 3000, seed=0, sharpened=3.0), "").probabilities(predicted)
    np.testing.assert_allclose(calibrated, drawn(kind, 3000, seed=1)[0], atol=0.03)
    before, after = (classification_metrics(kind, shares, targets) for shares in (predicted, calibrated))
    assert after["ece"] < before["ece"] / 2 and after["accuracy"] == before["accuracy"]


@pytest.mark.parametrize("kind", KINDS)
def test_sets_contain_the_share_of_true_labels_that_was_asked_for(kind):
    covered = []
    for seed in range(200):
        predicted, targets, rows = drawn(kind, 60, seed)
        known, new = rows < 39, rows >= 39
        calibration = fit(kind, predicted[known], targets[known], rows[known], "")
        calibrated = calibration.probabilities(predicted[new])
        covered.append(set_metrics(calibration, calibrated, targets[new], rows[new])["coverage_of_0.9"])
    assert 0.885 < np.mean(covered) < 0.93  # up to 0.9 + 1 / 40, and less for the error of 4,200 records


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40), st.integers(1, 999))
def test_the_threshold_is_the_corrected_quantile(scores, level):
    found = quantiles(np.array(scores), np.arange(len(scores)))
    rank = int(np.ceil((len(scores) + 1) * level / 1000 - 1e-6))
    assert found[level - 1 : level] == ([sorted(scores)[rank - 1]] if rank <= len(scores) else [])
