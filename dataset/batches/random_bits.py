"""Random bits as a pure function of what they are for.

A bit from a stream depends on the rank, the loader process and the order of the batches. One computed from (seed,
epoch, record, position) does not, so that a record is cropped and masked alike on one worker and on eight, and after
resuming as before. The mixer is SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators"), vectorised.
"""

from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bits: TypeAlias = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK_64 = (1 << 64) - 1


def splitmix64(counters: Bits) -> Bits:
    """The SplitMix64 output for each counter: a bijection of 64-bit numbers whose outputs look independent."""
    return _mix(counters + _GAMMA)


def _mix(bits: Bits) -> Bits:
    """SplitMix64 after its addition, into ``bits``: with one buffer beside it, both stay in the processor's cache."""
    shifted = np.right_shift(bits, _SHIFTS[0])
    bits ^= shifted
    bits *= _FACTORS[0]
    bits ^= np.right_shift(bits, _SHIFTS[1], out=shifted)
    bits *= _FACTORS[1]
    bits ^= np.right_shift(bits, _SHIFTS[2], out=shifted)
    return bits


def keyed_bits(purpose: int, seed: int, epoch: int, records: NDArray[np.integer]) -> Bits:
    """(N,) uint64: 64 random bits for each record, by its index in the store.

    ``purpose`` is a number for each use, so that (say) crops and masks of a record are independent.
    """
    return splitmix64(records.astype(np.uint64) ^ _key(purpose, seed, epoch))


@lru_cache(maxsize=64)
def _key(purpose: int, seed: int, epoch: int) -> np.uint64:
    """The key that the bits of all records of one use in one epoch have in common; the same for every batch."""
    key = np.zeros(1, dtype=np.uint64)
    # Mixed in one after the other, since neighbouring seeds and epochs would else give neighbouring keys.
    for number in (purpose, seed, epoch):
        key = splitmix64(key ^ np.uint64(number & _MASK_64))
    return key[0]


def positional_bits(keys_N: Bits, cu_seqlens: NDArray[np.integer]) -> Bits:
    """(T,) uint64: 64 random bits for each token, from those of its sequence (:func:`keyed_bits`) and its position.

    Within a sequence the counters advance by SplitMix64's own increment, so no two positions share their bits.
    """
    # key + (position + 1) * gamma, modulo 2^64, where position is the index in the batch less the sequence's start: one
    # product for each sequence and one for the whole batch, no loop over sequences.
    before_N = cu_seqlens[:-1].astype(np.uint64)
    before_N -= np.uint64(1)
    before_N *= _GAMMA
    bits_T = (keys_N - before_N).repeat(cu_seqlens[1:] - cu_seqlens[:-1])
    bits_T += np.arange(bits_T.size, dtype=np.uint64) * _GAMMA
    return _mix(bits_T)


def threshold(share: float) -> np.uint64:
    """The number that ``share`` of all 64-bit numbers lie below; for 1, the largest of them."""
    # 2^64 itself is none of the 64-bit numbers.
    return np.uint64(min(int(share * 2.0**64), _MASK_64))
