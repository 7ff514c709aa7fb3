"""The set of hashes agrees with Python's, with the kernel and without."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.fasta.kernel import Kernel, load_kernel
from dataset.store.hash_set import HashSet64

# Few distinct values with equal low bits, so that probing and duplicates inside one call are met often.
colliding = st.integers(0, 5).map(lambda high: high << 40) | st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module", params=["set", "compiled"])
def kernel(request) -> Kernel | None:
    if request.param == "set":
        return None
    return load_kernel() or pytest.skip("needs a C++ compiler")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(colliding, max_size=40), max_size=6))
def test_a_hash_is_fresh_exactly_once(kernel, calls):
    table, seen = HashSet64(kernel), set()
    for values in calls:
        fresh = table.add(np.array(values, dtype=np.uint64))
        expected = []
        for value in (max(value, 1) for value in values):  # 0 and 1 are one hash to it
            expected.append(value not in seen)
            seen.add(value)
        assert fresh.tolist() == expected
    assert len(table) == len(seen)


def test_growth_forgets_nothing(kernel):
    table = HashSet64(kernel)
    values = np.random.default_rng(0).integers(1, 2**64 - 1, size=600_000, dtype=np.uint64)
    for part in np.array_split(values, 50):
        assert table.add(part).all()
    assert len(table) == len(values)
    assert not table.add(values).any()
