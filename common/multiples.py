"""Multiples of a number, from tables made once: what numbers the tokens of a batch without counting them anew.

In: how many. Out: the start of a read-only table. A table is kept for each power of two that was needed, so there are
few, and together they are at most twice as large as the largest.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray


def multiples(factor: int, size: int) -> NDArray[np.uint64]:
    """(size,) uint64, read-only: ``factor`` times 0, 1, 2 ..., modulo 2^64."""
    return _table(factor, 1 << max(size - 1, 0).bit_length())[:size]


@cache
def _table(factor: int, size: int) -> NDArray[np.uint64]:
    table = np.arange(size, dtype=np.uint64)
    table *= np.uint64(factor)
    table.flags.writeable = False
    return table
