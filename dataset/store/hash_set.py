"""A set of 64-bit hashes that takes thousands at a time: how duplicate ids are noticed in files of any size.

A table of buckets of one cache line in one NumPy array: 16 to 32 bytes a record (4 MiB at first), where Python's set of
integers takes about 70. A bucket is gathered and compared as a whole, so that one insertion of a block of ids is a few
vector operations; linear probing takes many rounds of them.

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
        self._table_BS = np.zeros((1 << 16, _PLACES), dtype=np.uint64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, hashes_N: np.ndarray) -> np.ndarray:
        """Insert all; (N,) bool: True where the hash was in neither the set nor an earlier place of ``hashes_N``."""
        # 0 marks an empty place, so the hash 0 is kept as 1.
        values_N = np.maximum(hashes_N, np.uint64(1))
        while 2 * (self._count + len(values_N)) > self._table_BS.size:
            self._grow()
        in_order = None if self._kernel else np.sort(values_N)
        if in_order is None or (in_order[1:] != in_order[:-1]).all():
            fresh_N = self._insert(values_N)
        else:
            unique, first = np.unique(values_N, return_index=True)
            fresh_N = np.zeros(len(values_N), dtype=bool)
            fresh_N[first] = self._insert(unique)
        self._count += int(np.count_nonzero(fresh_N))
        return fresh_N

    def _grow(self) -> None:
        old_BS = self._table_BS
        # Not zeros(), whose memory is had in pages of 4 KiB; what NumPy allocates for empty() may be had in huge ones.
        self._table_BS = np.empty((2 * len(old_BS), _PLACES), dtype=np.uint64)
        self._table_BS.fill(_EMPTY)
        for start in range(0, len(old_BS), _BUCKETS_AT_ONCE):  # in parts, for the sake of memory
            part_BS = old_BS[start : start + _BUCKETS_AT_ONCE]
            # A place at a time, so that the values of one bucket, which want the same new one, don't meet in one call.
            for places in [part_BS] if self._kernel else part_BS.T:
                self._insert(places[places != _EMPTY])

    def _insert(self, unique: np.ndarray) -> np.ndarray:
        """Each value goes into its bucket, or the next one with a place; True where a value was not there."""
        if self._kernel:
            return self._kernel.insert(self._table_BS, unique)
        mask, places = len(self._table_BS) - 1, self._table_BS.reshape(-1)
        new = np.zeros(len(unique), dtype=bool)
        pending, values = None, unique
        buckets = (unique & np.uint64(mask)).astype(np.intp)
        while values.size:
            bucket_NS = self._table_BS.take(buckets, axis=0)
            missing = ~_any_of_eight(bucket_NS == values[:, None])
            used = _count_of_eight(bucket_NS != _EMPTY)  # a bucket fills from its first place on
            has_room = used < _PLACES
            tried = np.flatnonzero(missing & has_room)
            at, wanted = buckets[tried] * _PLACES + used[tried], values[tried]
            places[at] = wanted
            # Several values may want one place: the last written has it, the others find so and look again.
            placed = tried[places[at] == wanted]
            new[placed if pending is None else pending[placed]] = True
            missing[placed] = False
            left = np.flatnonzero(missing)
            pending = left if pending is None else pending[left]
            values, buckets = values[left], (buckets[left] + ~has_room[left]) & mask
        return new


def _any_of_eight(is_so_S: np.ndarray) -> np.ndarray:
    """(N, 8) bool to (N,) bool, a word of eight bytes at a time."""
    return is_so_S.view(np.uint64)[:, 0] != 0


def _count_of_eight(is_so_S: np.ndarray) -> np.ndarray:
    return np.bitwise_count(is_so_S.view(np.uint64)[:, 0])
