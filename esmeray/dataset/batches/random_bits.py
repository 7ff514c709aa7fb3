"""Random bits as a pure function of their purpose, and the split into training and held-out records.

Bits from a stream depend on the rank, the loader process and the order of the batches. Bits computed from (seed, epoch,
record, position) do not. A record is therefore cropped and masked equally on one worker and on eight, and after a
resume. The mixer is a vectorized SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators").

The split is by a hash of the sequence, so that duplicates are always on the same side. It depends only on the
sequences, not on their order, the run's seed or other records: a held-out sequence stays held out when the store grows.
:func:`split_stratified` and :func:`split_clusters` relax this, so that every class is on both sides.

Shape legend: T tokens, N records, S distinct sequences, K distinct sequences of one class, C classes.
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
    """Return the SplitMix64 output for each counter: a bijection of 64-bit numbers whose outputs look independent."""
    return _mix(counters + _GAMMA)


def _mix(bits: Bits) -> Bits:
    """Apply SplitMix64's mixing in place. With one extra buffer, the data stays in the CPU cache."""
    shifted = np.right_shift(bits, _SHIFTS[0])
    bits ^= shifted
    bits *= _FACTORS[0]
    bits ^= np.right_shift(bits, _SHIFTS[1], out=shifted)
    bits *= _FACTORS[1]
    bits ^= np.right_shift(bits, _SHIFTS[2], out=shifted)
    return bits


def keyed_bits(purpose: int, seed: int, epoch: int, records: NDArray[np.integer]) -> Bits:
    """Return (N,) uint64: 64 random bits per record, by its index in the store.

    ``purpose`` is a number per use, so that e.g. crops and masks of a record are independent.
    """
    return splitmix64(records.astype(np.uint64) ^ _key(purpose, seed, epoch))


@lru_cache(maxsize=64)
def _key(purpose: int, seed: int, epoch: int) -> np.uint64:
    """Return the key shared by all records for one purpose and epoch; every batch uses the same one."""
    key = np.zeros(1, dtype=np.uint64)
    # Mixed in one by one, because neighbouring seeds and epochs would otherwise give neighbouring keys.
    for number in (purpose, seed, epoch):
        key = splitmix64(key ^ np.uint64(number & _MASK_64))
    return key[0]


def positional_bits(keys_N: Bits, cu_seqlens: NDArray[np.integer]) -> Bits:
    """Return (T,) uint64: 64 random bits per token, from its sequence's bits (:func:`keyed_bits`) and its position.

    Within a sequence, the counters advance by SplitMix64's own increment, so no two positions share their bits.
    """
    # key + (position + 1) * gamma modulo 2^64, with position = index in the batch - start of the sequence. This is one
    # product per sequence and one for the whole batch, without a loop over sequences.
    before_N = (cu_seqlens[:-1].astype(np.uint64) - np.uint64(1)) * _GAMMA
    bits_T = (keys_N - before_N).repeat(cu_seqlens[1:] - cu_seqlens[:-1])
    bits_T += np.arange(bits_T.size, dtype=np.uint64) * _GAMMA
    return _mix(bits_T)


def threshold(share: float) -> np.uint64:
    """Return the number that a ``share`` of all 64-bit numbers is below; for share 1, the largest 64-bit number."""
    # 2^64 is not a 64-bit number.
    return np.uint64(min(int(share * 2.0**64), _MASK_64))


def split_records(sequence_hashes: NDArray[np.uint64], validation_share: float) -> tuple[Indices, Indices]:
    """Return the record indices for training and for validation, each ascending.

    A distinct sequence is held out with probability ``validation_share``. If this leaves a side empty, the distinct
    sequence nearest to the threshold moves there, with its duplicates. ``sequence_hashes`` (N,) are uint64.

    Raises DataError if there is only one distinct sequence and ``validation_share`` is above 0.
    """
    bits_N = _mixed(sequence_hashes)
    held_out_N = bits_N < threshold(validation_share)
    is_one_sided = held_out_N.all() or not held_out_N.any()
    # With a share of 0, an empty held-out side is correct.
    if validation_share > 0 and is_one_sided:
        lowest, highest = bits_N.min(), bits_N.max()
        if lowest == highest:
            raise DataError(
                f"the store has only one distinct sequence or group ({counted(bits_N.size, 'record{s}')}), so "
                f"it can't be split by data.validation_share {validation_share}: set data.validation_share to "
                "0, or add sequences"
            )
        held_out_N = bits_N != highest if held_out_N.all() else bits_N == lowest
    return np.flatnonzero(~held_out_N), np.flatnonzero(held_out_N)


def split_stratified(
    sequence_hashes: NDArray[np.uint64], classes: NDArray[np.int64], validation_share: float, may_part: bool = True
) -> tuple[Indices, Indices]:
    """Return the record indices for training and for validation, each ascending, with equal shares of every class.

    In each class, the first distinct sequences by hash are held out, according to the share. A class with two or more
    has at least one sequence on each side; the only sequence of a class is used for training. Duplicates stay on one
    side. A sequence with records in several classes is assigned by the class with the fewest sequences. If this leaves
    another class without one side, and ``may_part`` is set, that class's records of one sequence move to that side.

    Raises DataError if no class has two distinct sequences and ``validation_share`` is above 0.
    """
    if validation_share == 0:
        return np.arange(sequence_hashes.size), np.empty(0, dtype=np.int64)
    distinct_S, sequence_N = np.unique(_mixed(sequence_hashes), return_inverse=True)  # in the order of hashes
    pairs = np.unique(np.stack([classes, sequence_N]), axis=1)
    sequences_of = np.split(pairs[1], np.flatnonzero(np.diff(pairs[0])) + 1)
    held_out_S = np.full(distinct_S.size, -1, dtype=np.int8)  # -1: not assigned
    # Smallest class first, because it has the least choice.
    for sequences_K in sorted(sequences_of, key=len):
        _settle(held_out_S, sequences_K, validation_share)
    held_out_N = held_out_S[sequence_N] == 1
    # Assignments by other classes may have left a class on a single side.
    for number, sequences_K in zip(np.unique(pairs[0]), sequences_of, strict=True):
        num_held_out = int(held_out_S[sequences_K].sum())
        if may_part and len(sequences_K) > 1 and num_held_out in (0, len(sequences_K)):
            parting = sequences_K[0] if num_held_out == 0 else sequences_K[-1]
            held_out_N[(classes == number) & (sequence_N == parting)] = num_held_out == 0
    if not held_out_N.any():
        raise DataError(
            f"no class has two distinct sequences or groups ({counted(sequence_hashes.size, 'record{s}')}), so "
            f"classes can't be split by data.validation_share {validation_share}: set data.labels.split to "
            "hash, or add sequences"
        )
    return np.flatnonzero(~held_out_N), np.flatnonzero(held_out_N)


def split_clusters(
    clusters_N: NDArray[np.int64],
    sequence_hashes: NDArray[np.uint64],
    classes_N: NDArray[np.int64],
    validation_share: float,
) -> Indices:
    """Return the ascending record indices for validation: whole clusters, with about equal shares of every class.

    Clusters are considered in the order of their lowest hash, which does not depend on the order of the records. A
    cluster is held out if this brings the held-out records of its classes nearer to the share, and leaves training
    records of each class.

    Raises DataError if there is no such cluster and ``validation_share`` is above 0.
    """
    bits_N = _mixed(sequence_hashes)
    _, sizes = np.unique(clusters_N, return_counts=True)
    rows_of = np.split(np.argsort(clusters_N, kind="stable"), sizes.cumsum()[:-1])
    totals_C = np.bincount(classes_N)
    # At least one record, so that rare classes are evaluated, too.
    wanted_C = np.maximum(validation_share * totals_C, 1) * (validation_share > 0)
    held_C = np.zeros(totals_C.size)
    held_out_N = np.zeros(clusters_N.size, dtype=bool)
    for rows in sorted(rows_of, key=lambda rows: bits_N[rows].min()):
        more_C = held_C + np.bincount(classes_N[rows], minlength=totals_C.size)
        is_nearer = np.abs(more_C - wanted_C).sum() < np.abs(held_C - wanted_C).sum()
        if is_nearer and (more_C < totals_C)[classes_N[rows]].all():
            held_C, held_out_N[rows] = more_C, True
    if validation_share > 0 and not held_out_N.any():
        raise DataError(
            f"every cluster of similar proteins is too large to be held out (the largest has "
            f"{max(map(len, rows_of)):,} of {counted(held_out_N.size, 'record{s}')}): raise data.validation_share or "
            "data.labels.identity, or set data.labels.split to another method"
        )
    return np.flatnonzero(held_out_N)


def _settle(held_out_S: NDArray[np.int8], sequences_K: NDArray[np.int64], validation_share: float) -> None:
    """Assign the sequences of one class that no other class has assigned."""
    count = len(sequences_K)
    wanted = min(max(round(validation_share * count), 1), count - 1)
    # Classes that share sequences with this one may have held out more or fewer than it wants.
    free = sequences_K[held_out_S[sequences_K] < 0]
    missing = max(wanted - int((held_out_S[sequences_K] == 1).sum()), 0)
    held_out_S[free] = 0
    held_out_S[free[:missing]] = 1


def _mixed(sequence_hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the hashes mixed again, so that the split is uniform for any hash in the store."""
    return splitmix64(sequence_hashes.astype(np.uint64) ^ splitmix64(np.zeros(1, dtype=np.uint64)))
