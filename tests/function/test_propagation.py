"""Propagation beside its definition, term by term."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from esmeray.function.ontology import BLOCK, propagate, read_ontology
from tests.function.generated import generate


@pytest.mark.parametrize("method", ["max", "fill"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
@pytest.mark.parametrize("seed", range(4))
def test_each_term_takes_what_is_below_it(tmp_path, method, dtype, seed):
    random = np.random.default_rng(seed)
    for aspect in read_ontology(generate(tmp_path / "case", seed).folder / "terms.obo").aspects.values():
        shape = (BLOCK + 3, len(aspect.terms))
        given = (random.integers(1, 100, shape) * (random.random(shape) < 0.2)).astype(dtype)
        expected = given.copy()
        for term in reversed(range(shape[1])):
            children = aspect.parents[:, [term]].nonzero()[0]
            if len(children):
                below = expected[:, children].max(axis=1)
                own = expected[:, term]
                expected[:, term] = np.maximum(own, below) if method == "max" else np.where(own == 0, below, own)
        found = propagate(csr_array(given), aspect, method)
        assert found.dtype == dtype
        assert (found.toarray() == expected).all()
        if method == "max":
            term, parent = aspect.parents.nonzero()
            assert (expected[:, parent] >= expected[:, term]).all()
            assert (propagate(found, aspect).toarray() == expected).all()


def test_no_proteins_stay_none(tmp_path):
    (aspect, *_) = read_ontology(generate(tmp_path / "case", 0).folder / "terms.obo").aspects.values()
    assert propagate(csr_array((0, len(aspect.terms))), aspect).shape == (0, len(aspect.terms))
