"""From the records of one planned batch to its tokens and targets: reading, cropping, tokenizing, masking.

In: a store and record indices. Out: NumPy arrays, of bytes where they can be, since they may come from a loader
process. The result is a function of (settings, epoch, records) alone; who computes it and when changes nothing. Nothing
here needs torch, so that loader processes start fast.

Shape legend: T tokens, N sequences, M tokens to predict.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataset.batches.cropping import crop_starts, cropped_lengths
from dataset.batches.masking import Places, Tokens, mask_tokens, residue_targets
from dataset.store.reader import Store
from dataset.tokens.esm import cumulative_lengths, tokenize_pieces
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE, MaskedLMSection


@dataclass(frozen=True)
class PreparationSettings:
    """Settings of the preparation of batches.

    Attributes:
        max_length: residues; longer sequences are cropped.
        seed: of crops and masks. In validation not the run's seed, so that metrics of runs compare.
        random_crops: crop at random, as in training, or at the start, as in validation.
        masking: how much is masked, or None where every residue is its own target.
    """

    max_length: int
    seed: int
    random_crops: bool
    masking: MaskedLMSection | None


@dataclass(frozen=True)
class PreparedBatch:
    """A packed batch in its smallest form.

    Attributes:
        tokens: (T,) uint8.
        targets: (T,) uint8, :data:`dataset.batches.masking.NO_TARGET` where no loss is taken.
        cu_seqlens: (N+1,) int32, where each sequence starts.
        target_positions: (M,) int64, the tokens with a target, ascending; None without masking.
    """

    tokens: Tokens
    targets: Tokens
    cu_seqlens: NDArray[np.int32]
    target_positions: Places | None


def prepare_batch(
    store: Store, settings: PreparationSettings, epoch: int, records_N: NDArray[np.int64]
) -> PreparedBatch:
    """Read, crop, tokenize and mask the sequences of one batch. Raises DataError where the store is damaged."""
    whole_N = store.lengths[records_N]
    lengths_N = cropped_lengths(whole_N, settings.max_length)
    if settings.random_crops:
        starts_N = crop_starts(whole_N, settings.max_length, records_N, settings.seed, epoch)
    else:
        starts_N = np.zeros_like(lengths_N)
    tokens_T = tokenize_pieces(store.windows(records_N, starts_N, lengths_N))
    cu_seqlens = cumulative_lengths(lengths_N + SPECIAL_TOKENS_PER_SEQUENCE)
    if settings.masking is None:
        return PreparedBatch(tokens_T, residue_targets(tokens_T), cu_seqlens, None)
    masked = mask_tokens(tokens_T, cu_seqlens, records_N, settings.masking, settings.seed, epoch)
    return PreparedBatch(masked.inputs, masked.targets, cu_seqlens, masked.positions)
