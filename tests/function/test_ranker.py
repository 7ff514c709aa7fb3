"""The ranker of the components of a blend: properties of its trees, candidates and scores."""

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.ensemble import HistGradientBoostingClassifier

from esmeray.function.annotations import Annotations, information_accretion
from esmeray.function.ontology import Aspect
from esmeray.function.predictors import blended
from esmeray.function.ranker import Candidates, candidates, fit_ranker, scored, trees_of

PROTEINS = 400


@pytest.fixture(scope="module")
def aspect() -> Aspect:
    """A root with thirty children, each with one child."""
    child, parent = np.arange(1, 61), np.r_[np.zeros(30, int), np.arange(1, 31)]
    parents = csr_array((np.ones(60, bool), (child, parent)), shape=(61, 61))
    levels = np.repeat([0, 1, 2], [1, 30, 30])
    return Aspect("aspect", tuple(f"GO:{term}" for term in range(61)), levels, parents)


@pytest.fixture(scope="module")
def made(aspect) -> tuple[Candidates, csr_array, csr_array]:
    """Candidates, truth and blend; homology is right for near proteins only, the network for the others."""
    random = np.random.default_rng(0)
    truth, wrong = ((random.random((PROTEINS, 61)) < 0.05) @ aspect.ancestors.toarray() for _ in range(2))
    is_near_N1 = (np.arange(PROTEINS) % 3 > 0)[:, None]
    parts = {"homology": np.where(is_near_N1, truth, wrong), "network": np.where(is_near_N1, wrong, truth)}
    parts = {name: csr_array(scores * 0.8) for name, scores in parts.items()}
    near = csr_array(np.where(is_near_N1, 1.8, 0.3) * (np.arange(PROTEINS) < 5))
    terms = csr_array(truth)
    accretion_V = information_accretion(Annotations(tuple(map(str, range(PROTEINS))), terms), aspect)
    blend = blended(parts, {"homology": 0.6, "network": 0.4})
    return candidates(parts, blend, near, terms, aspect, accretion_V), terms, blend


def test_trees_as_arrays_give_what_scikit_learn_gives():
    random = np.random.default_rng(0)
    features = random.normal(size=(3000, 4)).astype(np.float32)
    truth = features[:, 0] * features[:, 1] + random.normal(size=3000) > 0
    model = HistGradientBoostingClassifier(max_iter=20, max_leaf_nodes=12).fit(features, truth)
    assert np.allclose(trees_of(model).probabilities(features), model.predict_proba(features)[:, 1], atol=1e-9)


def test_the_ranker_learns_whom_to_trust_for_which_protein(made):
    pairs, truth, blend = made
    _, crossed_K = fit_ranker(pairs, truth)
    is_true_K = np.asarray(truth[pairs.rows, pairs.columns]).ravel()
    blend_K = np.asarray(blend[pairs.rows, pairs.columns]).ravel()
    errors = [np.abs(values_K - is_true_K).mean() for values_K in (crossed_K, blend_K)]
    assert errors[0] < errors[1] / 2


def test_proteins_without_scores_have_no_candidates(aspect):
    nothing = csr_array((2, 61))
    terms = csr_array((3, 61), dtype=bool)
    pairs = candidates({"naive": nothing}, nothing, csr_array((2, 3)), terms, aspect, np.ones(61))
    assert pairs.features.shape[0] == 0 and scored(np.empty(0), pairs, aspect).nnz == 0
    ranker, _ = fit_ranker(pairs, csr_array((2, 61), dtype=bool))
    assert (ranker.probabilities(np.zeros((4, 11), np.float32)) == 0).all()
