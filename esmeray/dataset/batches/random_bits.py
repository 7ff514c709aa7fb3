"""Random bits as a pure function of what they are for, and the split into training and held-out records by them.

A bit from a stream depends on the rank, the loader process and the order of the batches. One computed from (seed,
epoch, record, position) does not, so that a record is cropped and masked alike on one worker and on eight, and after
resuming as before. The mixer is SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators"), vectorised.

The split is by a hash of the sequence, so that duplicates are always on the same side. It depends on the sequences
alone, not on their order, the run's seed or what else is in the store: a sequence that was held out stays so when the
store grows. :func:`split_stratified` gives up a little of that, so that every class is on both sides.

Shape legend: T tokens, N records, S distinct sequences, K distinct sequences of one class.
"""

from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.common.text import counted

Bits: TypeAlias = NDArray[np.uint64]
Indices = NDArray[np.int64]

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
    before_N = (cu_seqlens[:-1].astype(np.uint64) - np.uint64(1)) * _GAMMA
    bits_T = (keys_N - before_N).repeat(cu_seqlens[1:] - cu_seqlens[:-1])
    bits_T += np.arange(bits_T.size, dtype=np.uint64) * _GAMMA
    return _mix(bits_T)


def threshold(share: float) -> np.uint64:
    """The number that ``share`` of all 64-bit numbers lie below; for 1, the largest of them."""
    # 2^64 itself is none of the 64-bit numbers.
    return np.uint64(min(int(share * 2.0**64), _MASK_64))


def split_records(sequence_hashes: NDArray[np.uint64], validation_share: float) -> tuple[Indices, Indices]:
    """Record indices for training and for validation, each ascending.

    A distinct sequence is held out with probability ``validation_share``. Where that leaves a side empty, the distinct
    sequence nearest to the threshold moves there, with its duplicates. ``sequence_hashes`` (N,) are uint64.

    Raises DataError where there is one distinct sequence alone and two sides were asked for.
    """
    bits_N = _mixed(sequence_hashes)
    held_out_N = bits_N < threshold(validation_share)
    is_one_sided = held_out_N.all() or not held_out_N.any()
    # A share of 0 asks for no held-out records, which then may be none.
    if validation_share > 0 and is_one_sided:
        lowest, highest = bits_N.min(), bits_N.max()
        if lowest == highest:
            raise DataError(
                f"the store holds a single distinct sequence, or group ({counted(bits_N.size, 'record{s}')}), so "
                f"data.validation_share {validation_share} can't be held out: set data.validation_share to 0 "
                "or give more sequences"
            )
        held_out_N = bits_N != highest if held_out_N.all() else bits_N == lowest
    return np.flatnonzero(~held_out_N), np.flatnonzero(held_out_N)


def split_stratified(
    sequence_hashes: NDArray[np.uint64], classes: NDArray[np.int64], validation_share: float, may_part: bool = True
) -> tuple[Indices, Indices]:
    """Record indices for training and for validation, each ascending, with the same share of every class.

    Of each class the distinct sequences that come first by hash are held out, as many as the share says, but at least
    one and not all where there are two; the only sequence of a class is trained on. Duplicates stay on one side. A
    sequence with records of several classes is settled by the one with the fewest sequences; only where this leaves
    another class without a side are its records of one sequence divided from the other classes', if they ``may_part``.

    Raises DataError where no class has two distinct sequences and two sides were asked for.
    """
    if validation_share == 0:
        return np.arange(sequence_hashes.size), np.empty(0, dtype=np.int64)
    distinct_S, sequence_N = np.unique(_mixed(sequence_hashes), return_inverse=True)  # in the order of hashes
    pairs = np.unique(np.stack([classes, sequence_N]), axis=1)
    sequences_of = np.split(pairs[1], np.flatnonzero(np.diff(pairs[0])) + 1)
    held_out_S = np.full(distinct_S.size, -1, dtype=np.int8)  # -1: not settled
    # The smallest class first: the others can still choose where it can't.
    for sequences_K in sorted(sequences_of, key=len):
        _settle(held_out_S, sequences_K, validation_share)
    held_out_N = held_out_S[sequence_N] == 1
    # What other classes have settled may leave one on a single side.
    for number, sequences_K in zip(np.unique(pairs[0]), sequences_of, strict=True):
        num_held_out = int(held_out_S[sequences_K].sum())
        if may_part and len(sequences_K) > 1 and num_held_out in (0, len(sequences_K)):
            parting = sequences_K[0] if num_held_out == 0 else sequences_K[-1]
            held_out_N[(classes == number) & (sequence_N == parting)] = num_held_out == 0
    if not held_out_N.any():
        raise DataError(
            f"no class holds two distinct sequences, or groups ({counted(sequence_hashes.size, 'record{s}')}), so "
            f"data.validation_share {validation_share} of each can't be held out: set data.labels.split to "
            "hash or give more sequences"
        )
    return np.flatnonzero(~held_out_N), np.flatnonzero(held_out_N)


def _settle(held_out_S: NDArray[np.int8], sequences_K: NDArray[np.int64], validation_share: float) -> None:
    """Set which sequences of one class are held out, as far as no other class has said so."""
    count = len(sequences_K)
    wanted = min(max(round(validation_share * count), 1), count - 1)
    # Those that share sequences with a class before may have settled more or fewer than this one wants.
    free = sequences_K[held_out_S[sequences_K] < 0]
    missing = max(wanted - int((held_out_S[sequences_K] == 1).sum()), 0)
    held_out_S[free] = 0
    held_out_S[free[:missing]] = 1


def _mixed(sequence_hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The hashes mixed once more, so that the split is fair however the store computes them."""
    return splitmix64(sequence_hashes.astype(np.uint64) ^ splitmix64(np.zeros(1, dtype=np.uint64)))
