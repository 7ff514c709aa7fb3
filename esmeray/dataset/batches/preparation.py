"""From the records of one planned batch to its tokens and targets: reading, cropping, tokenizing, masking.

Out come NumPy arrays, of bytes where they can be, since they may come from a loader process. Every decision is a
function of (settings, epoch, record, position), so it is the same on any rank, in any loader process and in any order
of batches. Nothing here needs torch, so that loader processes start fast.

Sequences that are longer than the model takes are cropped: in training to a random window, in validation and prediction
to the start, so that metrics of different steps compare; or to both ends, in all of them.

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
"""Of tokens in a batch."""

NO_TARGET = 156
"""Target, as uint8, of a token that no loss looks at: the same byte as -100 in int8, torch's ``IGNORED_TARGET``."""

_RESIDUE_TARGETS = bytes(token if FIRST_RESIDUE <= token <= LAST_RESIDUE else NO_TARGET for token in range(256))
"""The target of each token where every residue is reconstructed."""

_CROP, _MASK = 1, 2
"""Purposes of random bits."""

_NEVER = np.uint64(2**64 - 1)

Crop = Literal["random", "start", "ends"]
"""The crop of a sequence that is too long: a random window, its start, or half from either end."""
FixedCrop = Literal["start", "ends"]
"""The same of what is judged or predicted, where nothing is random."""


class Masking(Protocol):
    """Shares of masked language modelling; its settings say what each is a share of."""

    @property
    def mask_share(self) -> float: ...
    @property
    def first_mask_share(self) -> float | None: ...
    @property
    def mask_token_share(self) -> float: ...
    @property
    def random_token_share(self) -> float: ...

    def at(self, step: int | None) -> "Masking":
        """The shares of a step of training; None for validation."""


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
    masking: Masking | None


class PreparedBatch(NamedTuple):
    """A packed batch in its smallest form.

    Attributes:
        tokens: (T,) uint8, some residues replaced where they are masked.
        targets: (T,) uint8, :data:`NO_TARGET` where no loss is taken.
        cu_seqlens: (N+1,) int32, where each sequence starts.
        target_positions: (M,) int64, the tokens with a target, ascending; None without masking.
    """

    tokens: Tokens
    targets: Tokens
    cu_seqlens: NDArray[np.int32]
    target_positions: Positions | None


def prepare_batch(
    store: Store, settings: PreparationSettings, epoch: int, records_N: NDArray[np.int64], step: int | None = None
) -> PreparedBatch:
    """Read, crop, tokenize and mask the sequences of one batch. Raises DataError where the store is damaged.

    ``step``: that of training, where the share that is masked follows it.
    """
    # Lengths are known without reading, so that of a long record the window alone is tokenized.
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
    """Targets of a task that reconstructs every residue: the token itself, :data:`NO_TARGET` for special tokens.

    X, B, U, Z and O stay targets: they are part of the alphabet, and rare (0.02 % of the residues of UniRef90).
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
    """Replace some of the (T,) uint8 tokens of the N records of a packed batch, special tokens left out.

    Each residue (non-standard ones too, as in ESM-2) is chosen on its own with probability ``shares.mask_share``. The
    one with the lowest bits of its sequence is chosen in any case, so that no sequence is read for nothing: that adds
    (1 - mask_share)^length targets on average. Validation gives the same ``epoch`` every time.
    """
    bits_T = positional_bits(keyed_bits(_MASK, seed, epoch, records_N), cu_seqlens)
    chosen_M = chosen_positions(bits_T, tokens_T, cu_seqlens, threshold(shares.mask_share))
    tokens_M = tokens_T[chosen_M]
    targets_T = np.full(tokens_T.size, NO_TARGET, dtype=np.uint8)
    targets_T[chosen_M] = tokens_M
    inputs_T = tokens_T.copy()
    # Mixed once more: bits that were below the threshold are small, and would say what comes instead.
    inputs_T[chosen_M] = _replacements(tokens_M, splitmix64(bits_T[chosen_M]), shares)
    return PreparedBatch(inputs_T, targets_T, cu_seqlens, chosen_M)


def chosen_positions(
    bits_T: Bits, tokens_T: Tokens, cu_seqlens: NDArray[np.integer], below: np.uint64 | Bits
) -> Positions:
    """(M,) ascending positions of the residues whose bits are below the threshold, or lowest in a sequence.

    ``below``: one for all, or one for each token. The lowest are looked for only where a sequence has none below it.
    """
    # One comparison for both ends: what is less than the first wraps round.
    is_residue_T = tokens_T - np.uint8(FIRST_RESIDUE) <= LAST_RESIDUE - FIRST_RESIDUE
    is_chosen_T = (bits_T < below) & is_residue_T
    chosen_M = is_chosen_T.nonzero()[0]
    # Nearly every batch ends here: at 15 %, one in ten thousand sequences of 57 residues has none below.
    bounds_N = chosen_M.searchsorted(cu_seqlens)
    if (bounds_N[1:] > bounds_N[:-1]).all():
        return chosen_M
    # By the same bits, so that a sequence's residue is the same whatever else is in the batch.
    residue_bits_T = np.where(is_residue_T, bits_T, _NEVER)
    lowest_N = np.minimum.reduceat(residue_bits_T, cu_seqlens[:-1])
    is_lowest_T = residue_bits_T == lowest_N.repeat(np.diff(cu_seqlens))
    return np.flatnonzero(is_chosen_T | (is_residue_T & is_lowest_T))


def _replacements(tokens_M: Tokens, bits_M: Bits, shares: Masking) -> Tokens:
    """(M,) the input for each chosen token: <mask>, a random standard residue, or the token itself."""
    # <mask> for all first: four of five are, and only the others need another draw.
    replaced_M = np.full(tokens_M.size, MASK, dtype=np.uint8)
    others = (bits_M >= threshold(shares.mask_token_share)).nonzero()[0]
    bits = bits_M[others]
    drawn = STANDARD_RESIDUES[(splitmix64(bits) % np.uint64(STANDARD_RESIDUES.size)).view(np.int64)]
    is_drawn = bits < threshold(shares.mask_token_share + shares.random_token_share)
    replaced_M[others] = np.where(is_drawn, drawn, tokens_M[others])
    return replaced_M


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
        starts_N[longer] = keyed_bits(_CROP, seed, epoch, records_N[longer]) % windows
    return starts_N
