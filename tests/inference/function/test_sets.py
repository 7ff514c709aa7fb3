import numpy as np
import pytest
from scipy.sparse import csr_array

from esmeray.common.errors import ConfigError
from esmeray.inference.calibration import thresholds_of
from esmeray.inference.function.sets import calibrated, calibration_errors, fit_sets, in_sets, pairs_of


def drawn(proteins: int, seed: int) -> tuple[csr_array, np.ndarray, np.ndarray, np.ndarray]:
    """Scores, terms and similarities of proteins; scores of similar proteins say more, and rare terms have none."""
    random = np.random.default_rng(seed)
    frequency_V = np.linspace(0.9, 0.02, 30)
    terms = random.random((proteins, 30)) < frequency_V
    terms[:, 0] = True
    nearest_N = random.choice([0.0, 0.5, 0.8, 2.0], proteins)
    noise = random.random(terms.shape) * (2.2 - nearest_N[:, None])
    scores = np.clip(frequency_V * 0.5 + terms * 0.3 - 0.2 * noise, 0.01, 1) * (frequency_V > 0.2)
    return csr_array(scores), terms, frequency_V, nearest_N


def test_sets_contain_the_share_of_terms_at_each_similarity_in_the_order_of_the_scores():
    scores, terms, frequency_V, nearest_N = drawn(2000, 0)
    thresholds = fit_sets(csr_array(terms), scores, frequency_V, nearest_N)
    scores, terms, _, nearest_N = drawn(4000, 1)
    contained = in_sets(scores, frequency_V, nearest_N, thresholds_of(thresholds, 0.9))
    covered_N = (contained & terms).sum(axis=1) / terms.sum(axis=1)
    for nearest in np.unique(nearest_N):
        assert 0.88 < covered_N[nearest_N == nearest].mean() < 0.92
    dense = scores.toarray()
    outside = np.where(contained, -1, dense).max(axis=1)
    assert (np.where(contained & (dense > 0), dense, 2).min(axis=1) >= outside).all()
    with pytest.raises(ConfigError, match="reaches at most"):
        thresholds_of(fit_sets(csr_array(terms), scores, frequency_V * 0, nearest_N), 0.999)


def test_probabilities_keep_the_order_of_the_scores_and_halve_their_error():
    scores, terms, *groups = drawn(2000, 0)
    calibration = fit_sets(csr_array(terms), scores, *groups)
    scores, terms, *groups = drawn(4000, 1)
    errors = calibration_errors(pairs_of(csr_array(terms), scores, *groups, calibration))
    assert errors["error_of_probability"] < errors["error_of_score"] / 2
    assert (np.diff(calibrated(scores, calibration).data[scores.data.argsort()]) >= 0).all()
    for unlearnable in (csr_array(terms | True), scores), (csr_array(terms), scores * 0):
        probabilities = calibrated(scores, fit_sets(*unlearnable, *groups)).data
        assert ((probabilities > 0) & (probabilities <= 1)).all()
