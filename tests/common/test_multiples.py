"""Multiples come from tables that are made once and can't be written to."""

from __future__ import annotations

import numpy as np
import pytest

from common.multiples import multiples


@pytest.mark.parametrize("factor", [1, 7, 2**64 - 59])
@pytest.mark.parametrize("size", [0, 1, 2, 63, 64, 65])
def test_multiples_are_modulo_two_to_the_64(factor, size):
    assert multiples(factor, size).tolist() == [factor * index % 2**64 for index in range(size)]


def test_sizes_up_to_a_power_of_two_share_a_table_that_nobody_writes_to():
    first, second = multiples(3, 40), multiples(3, 64)
    assert np.shares_memory(first, second)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
