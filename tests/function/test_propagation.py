"""Propagation beside its definition, term by term."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from esmeray.function.ontology import BLOCK, propagate, read_ontology
from tests.function.generated import generate


@pytest.mark.parametrize("method", ["max", "fill"])
@pytest.mark.parametrize(("dtype", "seed"), [(np.uint8, 0), (np.float32, 1), (np.float64, 2)])
def test_each_term_takes_what_is_below_it_and_no_proteins_stay_none(tmp_path, method, dtype, seed):
    random = np.random.default_rng(seed)
    for aspect in read_ontology(generate(tmp_path / "case", seed).folder / "terms.obo").aspects.values():
        shape = (BLOCK + 3, len(aspect.terms))
        scores = (random.integers(1, 100, shape) * (random.random(shape) < 0.2)).astype(dtype)
        expected = scores.copy()
        for term in reversed(range(shape[1])):
            children = aspect.parents[:, [term]].nonzero()[0]
            if len(children):
                below = expected[:, children].max(axis=1)
                own = expected[:, term]
                expected[:, term] = np.maximum(own, below) if method == "max" else np.where(own == 0, below, own)
        propagated = propagate(csr_array(scores), aspect, method)
        assert propagated.dtype == dtype
        assert (propagated.toarray() == expected).all()
        assert propagate(csr_array((0, shape[1])), aspect, method).shape == (0, shape[1])
