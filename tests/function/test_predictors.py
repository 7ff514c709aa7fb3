"""Each predictor's scores from annotated proteins. Tests of the command check that no term exceeds its parents."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from esmeray.function.predictors import blended, fit_blend, naive, nearest, transferred

TERMS = csr_array(np.array([[1, 1, 0], [1, 0, 1], [1, 0, 0]], bool))


def test_naive_scores_are_shares_of_the_annotated_proteins():
    assert np.allclose(naive(TERMS, 2).toarray(), [[1, 1 / 3, 1 / 3]] * 2)
    weights = csr_array(np.array([[30.0, 10, 0], [0, 0, 0]]))
    assert np.allclose(transferred(weights, TERMS).toarray(), [[1, 0.75, 0.25], [0, 0, 0]])


def test_nearest_neighbours_weigh_by_cosine_and_equal_a_search_one_by_one():
    random = np.random.default_rng(0)
    queries_NC, known_MC = random.normal(size=(7, 5)), random.normal(size=(20, 5))
    weights_NM = nearest(queries_NC, known_MC, 4, 0.1).toarray()
    norms_NM = np.linalg.norm(queries_NC, axis=1)[:, None] * np.linalg.norm(known_MC, axis=1)
    cosine_NM = queries_NC @ known_MC.T / norms_NM
    is_near_NM = cosine_NM >= np.sort(cosine_NM, axis=1)[:, -4:-3]
    expected_NM = np.exp((cosine_NM - cosine_NM.max(axis=1, keepdims=True)) / 0.1)
    assert np.allclose(weights_NM, expected_NM * is_near_NM)


def test_the_blend_finds_the_part_that_is_right():
    random = np.random.default_rng(1)
    truth = csr_array(random.random((200, 30)) < 0.2)
    right = csr_array(truth * 0.5)
    noise = csr_array(random.random((200, 30)) * (random.random((200, 30)) < 0.2))
    weights = fit_blend({"right": right, "noise": noise, "empty": csr_array((200, 30))}, truth, np.ones(30))
    assert weights["right"] == pytest.approx(2, abs=1e-3) and weights["noise"] == pytest.approx(0, abs=1e-3)
    assert blended({"right": right}, {"right": 4.0}).max() == 1
