"""A set of 64-bit hashes that takes thousands at a time: how duplicate ids are noticed in files of any size.

An open-addressing table in one NumPy array: 16 to 32 bytes a record, where Python's set of integers takes about 70,
and one insertion of a block of ids costs a few vector operations.

Shape legend: N hashes.
"""

from __future__ import annotations

import numpy as np

_EMPTY = np.uint64(0)
_REHASH_AT_ONCE = 1 << 16


class HashSet64:
    """Set of uint64 that only grows."""

    def __init__(self) -> None:
        self._table = np.zeros(1 << 16, dtype=np.uint64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, hashes_N: np.ndarray) -> np.ndarray:
        """Insert all; (N,) bool: True where the hash was in neither the set nor an earlier place of ``hashes_N``."""
        # 0 marks an empty place, so the hash 0 is kept as 1.
        values_N = np.maximum(hashes_N, np.uint64(1))
        in_order = np.sort(values_N)
        while 2 * (self._count + len(values_N)) > len(self._table):
            self._grow()
        if (in_order[1:] != in_order[:-1]).all():
            fresh_N = self._insert(values_N)
        else:
            unique, first = np.unique(values_N, return_index=True)
            fresh_N = np.zeros(len(values_N), dtype=bool)
            fresh_N[first] = self._insert(unique)
        self._count += int(np.count_nonzero(fresh_N))
        return fresh_N

    def _grow(self) -> None:
        old = self._table
        self._table = np.zeros(2 * len(old), dtype=np.uint64)
        for start in range(0, len(old), _REHASH_AT_ONCE):  # in parts, for the sake of memory
            part = old[start : start + _REHASH_AT_ONCE]
            self._insert(part[part != _EMPTY])

    def _insert(self, unique: np.ndarray) -> np.ndarray:
        """Linear probing for all values at once; True where a value was not there."""
        mask = len(self._table) - 1
        places = (unique & np.uint64(mask)).astype(np.intp)
        new = np.zeros(len(unique), dtype=bool)
        pending = np.arange(len(unique))
        while pending.size:
            values = unique[pending]
            free = self._table[places] == _EMPTY
            # Several values may want one free place: the last written has it, the others find so and move on.
            self._table[places[free]] = values[free]
            settled = self._table[places] == values
            new[pending[free & settled]] = True
            moving = ~settled
            pending, places = pending[moving], (places[moving] + 1) & mask
        return new
