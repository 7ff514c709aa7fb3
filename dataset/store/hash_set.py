"""A set of 64-bit hashes that takes thousands at a time: how duplicate ids are noticed in files of any size.

With the compiled kernel, a table of buckets of one cache line in one NumPy array: 16 to 32 bytes a record (4 MiB at
first). Without it, Python's set of integers, which takes about 70.

Shape legend: N hashes, B buckets, S places of a bucket.
"""

from __future__ import annotations

import numpy as np

from dataset.fasta.kernel import Kernel

_PLACES = 8
_EMPTY = np.uint64(0)
_BUCKETS_AT_ONCE = 1 << 13


class HashSet64:
    """Set of uint64 that only grows."""

    def __init__(self, kernel: Kernel | None = None) -> None:
        self._kernel = kernel
        self._values: set[int] = set()
        self._table_BS = np.zeros((1 << 16, _PLACES) if kernel else (0, _PLACES), dtype=np.uint64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, hashes_N: np.ndarray) -> np.ndarray:
        """Insert all; (N,) bool: True where the hash was in neither the set nor an earlier place of ``hashes_N``."""
        # 0 marks an empty place, so the hash 0 is kept as 1.
        values_N = np.maximum(hashes_N, np.uint64(1))
        if self._kernel is None:
            fresh_N = self._add_to_set(values_N)
        else:
            while 2 * (self._count + len(values_N)) > self._table_BS.size:
                self._grow(self._kernel)
            fresh_N = self._kernel.insert(self._table_BS, values_N)
        self._count += int(np.count_nonzero(fresh_N))
        return fresh_N

    def _add_to_set(self, values_N: np.ndarray) -> np.ndarray:
        fresh_N = np.zeros(len(values_N), dtype=bool)
        for place, value in enumerate(values_N.tolist()):
            if value not in self._values:
                self._values.add(value)
                fresh_N[place] = True
        return fresh_N

    def _grow(self, kernel: Kernel) -> None:
        old_BS = self._table_BS
        # Not zeros(), whose memory is had in pages of 4 KiB; what NumPy allocates for empty() may be had in huge ones.
        self._table_BS = np.empty((2 * len(old_BS), _PLACES), dtype=np.uint64)
        self._table_BS.fill(_EMPTY)
        for start in range(0, len(old_BS), _BUCKETS_AT_ONCE):  # in parts, for the sake of memory
            part_BS = old_BS[start : start + _BUCKETS_AT_ONCE]
            kernel.insert(self._table_BS, part_BS[part_BS != _EMPTY])
