"""Random bits as a pure function of what they are for.

A bit drawn from a stream depends on everything drawn before it: on the rank, the loader process and the order of the
batches. A bit computed from (seed, epoch, record, position) depends on nothing else, so that the same record is cropped
and masked alike on one worker and on eight, and after resuming as before.

The mixer is SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"), vectorised.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bits: TypeAlias = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK_64 = (1 << 64) - 1


def splitmix64(counters: Bits) -> Bits:
    """The SplitMix64 output for each counter: a bijection of 64-bit numbers whose outputs look independent.

    Args:
        counters: uint64 of any shape.

    Returns:
        uint64 of the same shape.
    """
    bits = counters + _GAMMA
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def keyed_bits(purpose: int, seed: int, epoch: int, records: NDArray[np.integer]) -> Bits:
    """64 random bits for each record.

    Args:
        purpose: a number for each use, so that (say) crops and masks of a record are independent.
        seed: of the run.
        epoch: from 0.
        records: (N,) index of each sequence in its store.

    Returns:
        (N,) uint64.
    """
    key = np.zeros(1, dtype=np.uint64)
    for part in (purpose, seed, epoch):
        key = splitmix64(key ^ np.uint64(part & _MASK_64))
    return splitmix64(key ^ records.astype(np.uint64))


def positional_bits(keys_N: Bits, segments_T: NDArray[np.integer], positions_T: NDArray[np.integer]) -> Bits:
    """64 random bits for each token, from the bits of its sequence and its position there.

    Within a sequence the counters advance by SplitMix64's own increment, so no two positions share their bits.

    Args:
        keys_N: (N,) from :func:`keyed_bits`.
        segments_T: (T,) index in 0..N-1 of each token's sequence.
        positions_T: (T,) position of each token in its sequence.

    Returns:
        (T,) uint64.
    """
    return splitmix64(keys_N[segments_T] + positions_T.astype(np.uint64) * _GAMMA)


def threshold(share: float) -> np.uint64:
    """The number that ``share`` of all 64-bit numbers lie below; for 1, the largest of them."""
    return np.uint64(min(int(share * 2.0**64), _MASK_64))
