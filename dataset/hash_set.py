"""A set of 64-bit hashes that takes thousands at a time: how duplicate ids are noticed in files of any size.

An open-addressing table in one NumPy array: 16 to 32 bytes a record, where Python's set of integers takes about 70,
and one insertion of a block of ids costs a few vector operations.

Shape legend: N hashes.
"""

from __future__ import annotations

import numpy as np

_EMPTY = np.uint64(0)


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
        values_N = np.where(hashes_N == _EMPTY, np.uint64(1), hashes_N)
        unique, first = np.unique(values_N, return_index=True)
        while 2 * (self._count + len(unique)) > len(self._table):
            self._grow()
        fresh_N = np.zeros(len(values_N), dtype=bool)
        fresh_N[first] = self._insert(unique)
        self._count += int(fresh_N.sum())
        return fresh_N

    def _grow(self) -> None:
        kept = self._table[self._table != _EMPTY]
        self._table = np.zeros(2 * len(self._table), dtype=np.uint64)
        self._insert(kept)

    def _insert(self, unique: np.ndarray) -> np.ndarray:
        """Linear probing for all values at once; True where a value was not there."""
        mask = np.uint64(len(self._table) - 1)
        slots = unique & mask
        new = np.zeros(len(unique), dtype=bool)
        pending = np.arange(len(unique))
        while pending.size:
            values, places = unique[pending], slots[pending]
            free = self._table[places] == _EMPTY
            # Several values may want one free place: the last written has it, the others find so and move on.
            self._table[places[free]] = values[free]
            settled = self._table[places] == values
            new[pending[free & settled]] = True
            slots[pending] = (places + np.uint64(1)) & mask
            pending = pending[~settled]
        return new
