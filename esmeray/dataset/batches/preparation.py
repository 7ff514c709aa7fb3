"""Prepare the tokens and targets of a planned batch: read, crop, tokenize, mask.

The output is NumPy arrays, uint8 if possible, because they may be sent from a loader process. All random decisions are
functions of (settings, epoch, record, position). They are the same for all ranks, loader processes and batch orders.
Nothing here imports torch, so that loader processes start fast.

Sequences longer than the model's maximum are cropped: to a random window in training, to the start in validation and
prediction, so that metrics of different steps are comparable; or always to both ends.

Shape legend: T tokens, N sequences, M tokens to predict.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from esmeray.dataset.batches.random_bits import Bits, keyed_bits, positional_bits, splitmix64, threshold
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE
from esmeray.dataset.store.reader import Store
from esmeray.dataset.tokens.esm import (
    FIRST_RESIDUE,
    LAST_RESIDUE,
    MASK,
    STANDARD_RESIDUES,
    cumulative_lengths,
    tokenize_pieces,
)

Tokens = NDArray[np.uint8]
Positions = NDArray[np.intp]
"""Positions of tokens in a batch."""

NO_TARGET = 156
"""Target, as uint8, of a token without a loss: the same byte as -100 in int8, torch's ``IGNORED_TARGET``."""

_RESIDUE_TARGETS = bytes(token if FIRST_RESIDUE <= token <= LAST_RESIDUE else NO_TARGET for token in range(256))
"""Target of each token if all residues are reconstructed."""

_CROP, _MASK = 1, 2
"""Purposes of random bits."""

_NEVER = np.uint64(2**64 - 1)

Crop = Literal["random", "start", "ends"]
"""Crop of a sequence that is too long: a random window, its start, or half from either end."""
FixedCrop = Literal["start", "ends"]
"""Crop modes for evaluation and inference, which are deterministic."""


class Masking(Protocol):
    """Shares of masked language modelling; see the settings for their meaning."""

    @property
    def mask_share(self) -> float: ...
    @property
    def mask_token_share(self) -> float: ...
    @property
    def random_token_share(self) -> float: ...

    def at(self, step: int | None) -> "Masking":
        """Return the shares at a training step; None means validation."""


@dataclass(frozen=True)
class PreparationSettings:
    """Settings of the preparation of batches.

    Attributes:
        max_length: maximum residues; longer sequences are cropped.
        seed: seed of crops and masks. Validation has a fixed seed, so that metrics of runs are comparable.
        random_crops: True to crop at random, as in training; False to keep the start, as in validation.
        masking: shares of masked residues, or None if every residue is its own target.
    """

    max_length: int
    seed: int
    random_crops: bool
    masking: Masking | None


class PreparedBatch(NamedTuple):
    """A packed batch in its smallest form.

    Attributes:
        tokens: (T,) uint8; masked residues are replaced.
        targets: (T,) uint8; :data:`NO_TARGET` for tokens without a loss.
        cu_seqlens: (N+1,) int32, start of each sequence, and the end.
        target_positions: (M,) int64, positions of tokens with a target, ascending; None without masking.
    """

    tokens: Tokens
    targets: Tokens
    cu_seqlens: NDArray[np.int32]
    target_positions: Positions | None


def prepare_batch(
    store: Store, settings: PreparationSettings, epoch: int, records_N: NDArray[np.int64], step: int | None = None
) -> PreparedBatch:
    """Read, crop, tokenize and mask the sequences of one batch. Raises DataError if the store is damaged.

    ``step``: training step, for a masked share that depends on it.
    """
    # Lengths are known without reading, so only the window of a long record is tokenized.
    whole_N = store.lengths[records_N]
    lengths_N = cropped_lengths(whole_N, settings.max_length)
    starts_N = (
        crop_starts(whole_N, settings.max_length, records_N, settings.seed, epoch)
        if settings.random_crops
        else np.zeros_like(lengths_N)
    )
    tokens_T = tokenize_pieces(store.windows(records_N, starts_N, lengths_N))
    cu_seqlens = cumulative_lengths(lengths_N + SPECIAL_TOKENS_PER_SEQUENCE)
    if settings.masking is None:
        return PreparedBatch(tokens_T, residue_targets(tokens_T), cu_seqlens, None)
    return mask_tokens(tokens_T, cu_seqlens, records_N, settings.masking.at(step), settings.seed, epoch)


def residue_targets(tokens_T: Tokens) -> Tokens:
    """Return targets for reconstructing all residues: the token itself, :data:`NO_TARGET` for special tokens.

    X, B, U, Z and O remain targets: they belong to the alphabet, and are rare (0.02 % of the residues of UniRef90).
    """
    return np.frombuffer(bytearray(tokens_T.data).translate(_RESIDUE_TARGETS), dtype=np.uint8)


def mask_tokens(
    tokens_T: Tokens,
    cu_seqlens: NDArray[np.int32],
    records_N: NDArray[np.integer],
    shares: Masking,
    seed: int,
    epoch: int,
) -> PreparedBatch:
    """Mask some of the (T,) uint8 tokens of a packed batch of N records. Special tokens are never masked.

    Each residue, non-standard ones included as in ESM-2, is chosen independently with probability
    ``shares.mask_share``. The residue with the lowest bits of its sequence is always chosen, so that no sequence is
    without a target. This adds (1 - mask_share)^length targets on average. In validation ``epoch`` is constant.
    """
    bits_T = positional_bits(keyed_bits(_MASK, seed, epoch, records_N), cu_seqlens)
    chosen_M = chosen_positions(bits_T, tokens_T, cu_seqlens, threshold(shares.mask_share))
    tokens_M = tokens_T[chosen_M]
    targets_T = np.full(tokens_T.size, NO_TARGET, dtype=np.uint8)
    targets_T[chosen_M] = tokens_M
    inputs_T = tokens_T.copy()
    # Mix again: the chosen bits are all below the threshold, so they would bias the replacement.
    inputs_T[chosen_M] = _replacements(tokens_M, splitmix64(bits_T[chosen_M]), shares)
    return PreparedBatch(inputs_T, targets_T, cu_seqlens, chosen_M)


def chosen_positions(
    bits_T: Bits, tokens_T: Tokens, cu_seqlens: NDArray[np.integer], below: np.uint64 | Bits
) -> Positions:
    """Return (M,) ascending positions of residues with bits below the threshold, at least one per sequence.

    ``below``: one threshold, or one per token. In a sequence without bits below it, the residue with the lowest bits is
    chosen.
    """
    # One comparison for both ends, because smaller ids wrap around in uint8.
    is_residue_T = tokens_T - np.uint8(FIRST_RESIDUE) <= LAST_RESIDUE - FIRST_RESIDUE
    is_chosen_T = (bits_T < below) & is_residue_T
    chosen_M = is_chosen_T.nonzero()[0]
    # Nearly every batch returns here: at 15 %, one of ten thousand sequences of 57 residues has no chosen residue.
    bounds_N = chosen_M.searchsorted(cu_seqlens)
    if (bounds_N[1:] > bounds_N[:-1]).all():
        return chosen_M
    # Chosen by the same bits, so that the result does not depend on other sequences in the batch.
    residue_bits_T = np.where(is_residue_T, bits_T, _NEVER)
    lowest_N = np.minimum.reduceat(residue_bits_T, cu_seqlens[:-1])
    is_lowest_T = residue_bits_T == lowest_N.repeat(np.diff(cu_seqlens))
    return np.flatnonzero(is_chosen_T | (is_residue_T & is_lowest_T))


def _replacements(tokens_M: Tokens, bits_M: Bits, shares: Masking) -> Tokens:
    """Return (M,) the input for each chosen token: <mask>, a random standard residue, or the token itself."""
    # Start with <mask>, as most tokens become it; only the others need another draw.
    replaced_M = np.full(tokens_M.size, MASK, dtype=np.uint8)
    others = (bits_M >= threshold(shares.mask_token_share)).nonzero()[0]
    bits = bits_M[others]
    drawn = STANDARD_RESIDUES[(splitmix64(bits) % np.uint64(STANDARD_RESIDUES.size)).view(np.int64)]
    is_drawn = bits < threshold(shares.mask_token_share + shares.random_token_share)
    replaced_M[others] = np.where(is_drawn, drawn, tokens_M[others])
    return replaced_M


class CropCount(NamedTuple):
    """Number of sequences that an epoch crops, and of residues that it leaves out."""

    sequences: int
    residues: int


def fixed_crop(crop: Crop) -> FixedCrop:
    """Return the crop in validation and prediction after training with ``crop``."""
    return "start" if crop == "random" else crop


def head_length(kept: int, crop: FixedCrop) -> int:
    """Return how many of the ``kept`` residues of a cropped sequence come from its start; the rest are from its end."""
    return kept if crop == "start" else (kept + 1) // 2


def cropped_lengths(lengths_N: NDArray[np.integer], max_length: int) -> NDArray[np.int64]:
    """Return (N,) residues of each sequence after cropping."""
    return np.minimum(lengths_N.astype(np.int64), max_length)


def count_cropped(lengths_N: NDArray[np.integer], max_length: int) -> CropCount:
    """Count the cropped sequences and the residues left out; the same in each epoch."""
    excess_N = lengths_N.astype(np.int64) - cropped_lengths(lengths_N, max_length)
    return CropCount(int(np.count_nonzero(excess_N)), int(excess_N.sum()))


def crop_starts(
    lengths_N: NDArray[np.integer], max_length: int, records_N: NDArray[np.integer], seed: int, epoch: int
) -> NDArray[np.int64]:
    """Return (N,) start of each sequence's random window, uniform over all windows; 0 for sequences that fit.

    ``lengths_N`` are the residues of whole sequences, ``records_N`` their indices in the store.
    """
    starts_N = np.zeros(lengths_N.size, dtype=np.int64)
    longer = (lengths_N > max_length).nonzero()[0]
    if longer.size:  # zero in many batches, a few in most
        windows = lengths_N[longer].astype(np.uint64) - np.uint64(max_length - 1)
        # The modulo favours early windows by a factor below 1 + windows / 2^64, which is negligible.
        starts_N[longer] = keyed_bits(_CROP, seed, epoch, records_N[longer]) % windows
    return starts_N
