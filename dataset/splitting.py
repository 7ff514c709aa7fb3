"""Which records are held out: decided by a hash of the sequence, so that duplicates always land on the same side.

In: the sequence hashes of a store. Out: the record indices for training and for validation. The split depends on
the sequences alone, not on their order, on the run's seed or on what else is in the store: a sequence that was held out
stays held out when the store grows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataset.random_bits import splitmix64, threshold
from train_config.errors import DataError

Indices = NDArray[np.int64]


def split_records(
    sequence_hashes: NDArray[np.uint64], validation_share: float, seed: int = 0
) -> tuple[Indices, Indices]:
    """Record indices for training and for validation, each ascending.

    A distinct sequence is held out with probability ``validation_share``. Where that leaves a side empty, the distinct
    sequence nearest to the threshold moves there, with its duplicates.

    Args:
        sequence_hashes: (N,) uint64, equal for equal sequences.
        validation_share: share of distinct sequences to hold out; 0 holds out nothing.
        seed: another number gives another split.

    Returns:
        Two int64 arrays that together hold each of 0..N-1 once.

    Raises:
        DataError: there is no record, or only one distinct sequence where two sides were asked for.
    """
    if sequence_hashes.size == 0:
        raise DataError("the store holds no sequences, so there is nothing to train on: give a source that holds some")
    # Mixed once more, so that the split is fair however the store computes its hashes.
    bits_N = splitmix64(sequence_hashes.astype(np.uint64) ^ splitmix64(np.array([seed], dtype=np.uint64)))
    held_out_N = bits_N < threshold(validation_share)
    if validation_share > 0:
        held_out_N = _with_both_sides(held_out_N, bits_N, validation_share)
    return np.flatnonzero(~held_out_N), np.flatnonzero(held_out_N)


def _with_both_sides(
    held_out_N: NDArray[np.bool_], bits_N: NDArray[np.uint64], validation_share: float
) -> NDArray[np.bool_]:
    """The same split, or the nearest one in which neither side is empty."""
    if held_out_N.any() and not held_out_N.all():
        return held_out_N
    lowest, highest = bits_N.min(), bits_N.max()
    if lowest == highest:
        raise DataError(
            f"the store holds a single distinct sequence ({bits_N.size} records), so data.validation_share "
            f"{validation_share} can't be held out: set data.validation_share to 0 or give more sequences"
        )
    return bits_N != highest if held_out_N.all() else bits_N == lowest
