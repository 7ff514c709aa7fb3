"""Crops of sequences that are longer than the model takes.

In training a random window, a function of (seed, epoch, record) alone; in validation and prediction the start, so that
metrics of different steps compare; or both ends, in all of them. How much is lost is known from the lengths.

Shape legend: N sequences.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataset.batches.random_bits import keyed_bits

Crop = Literal["random", "start", "ends"]
"""The crop of a sequence that is too long: a random window, its start, or half from either end."""
FixedCrop = Literal["start", "ends"]
"""The same of what is judged or predicted, where nothing is random."""

_PURPOSE = 1


class CropCount(NamedTuple):
    """Sequences that an epoch crops, and residues that it leaves out by that."""

    sequences: int
    residues: int


def fixed_crop(crop: Crop) -> FixedCrop:
    """The crop in validation and prediction after training with ``crop``."""
    return "start" if crop == "random" else crop


def head_length(kept: int, crop: FixedCrop) -> int:
    """Residues of the ``kept`` ones of a longer sequence that come from its start; the rest comes from its end."""
    return kept if crop == "start" else (kept + 1) // 2


def cropped_lengths(lengths_N: NDArray[np.integer], max_length: int) -> NDArray[np.int64]:
    """(N,) residues that are left of each sequence."""
    return np.minimum(lengths_N.astype(np.int64), max_length)


def count_cropped(lengths_N: NDArray[np.integer], max_length: int) -> CropCount:
    """Count what cropping to ``max_length`` residues leaves out; the same in each epoch."""
    excess_N = lengths_N.astype(np.int64) - cropped_lengths(lengths_N, max_length)
    return CropCount(int(np.count_nonzero(excess_N)), int(excess_N.sum()))


def crop_starts(
    lengths_N: NDArray[np.integer], max_length: int, records_N: NDArray[np.integer], seed: int, epoch: int
) -> NDArray[np.int64]:
    """(N,) start of each sequence's random window: uniform over all windows, 0 for those that fit.

    ``lengths_N`` are residues of the whole sequences, ``records_N`` their indices in the store.
    """
    starts_N = np.zeros(lengths_N.size, dtype=np.int64)
    longer = (lengths_N > max_length).nonzero()[0]
    if longer.size:  # few are in most batches, and none in many
        windows = lengths_N[longer].astype(np.uint64) - np.uint64(max_length - 1)
        # The modulo favours early windows by less than windows / 2^64, which no run can notice.
        starts_N[longer] = keyed_bits(_PURPOSE, seed, epoch, records_N[longer]) % windows
    return starts_N
