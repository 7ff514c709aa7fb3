"""Which residues a masked language model has to predict, and what it sees in their place.

In: the tokens of a packed batch. Out: the same with some replaced, and the targets. Every decision is a function of
(seed, epoch, record, position), so it is the same on any rank, in any loader process and in any order of batches.
Nothing here needs torch, so that loader processes start fast.

Shape legend: T tokens, N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataset.random_bits import Bits, keyed_bits, positional_bits, splitmix64, threshold
from dataset.tokenizer import FIRST_RESIDUE, LAST_RESIDUE, MASK, STANDARD_RESIDUES

Tokens = NDArray[np.uint8]

NO_TARGET = 255
"""Target, as uint8, of a token that no loss looks at; on the way to torch it becomes ``IGNORED_TARGET``."""

_PURPOSE = 2
_NEVER = np.uint64(2**64 - 1)


@dataclass(frozen=True)
class MaskingShares:
    """How much is masked, and how (Devlin et al. 2019; see ``train_config.schema.MaskedLMSection``).

    Attributes:
        masked: share of residues to predict.
        mask_token: of these, share that becomes <mask>.
        random_token: of these, share that becomes a random one of the 20 standard residues; the rest stay.
    """

    masked: float
    mask_token: float
    random_token: float


def residue_targets(tokens_T: Tokens) -> Tokens:
    """Targets of a task that reconstructs every residue: the token itself, :data:`NO_TARGET` for special tokens.

    X, B, U, Z and O stay targets: they are part of the alphabet, and rare (0.02 % of the residues of UniRef90).
    """
    return np.where(_is_residue(tokens_T), tokens_T, np.uint8(NO_TARGET))


def mask_tokens(
    tokens_T: Tokens,
    cu_seqlens: NDArray[np.integer],
    records_N: NDArray[np.integer],
    shares: MaskingShares,
    seed: int,
    epoch: int,
) -> tuple[Tokens, Tokens]:
    """Tokens with some residues replaced, and what they were.

    Each residue (non-standard ones too, as in ESM-2) is chosen on its own with probability ``shares.masked``. The one
    with the lowest bits of its sequence is chosen in any case, so that no sequence is read for nothing; that
    adds (1 - masked)^length targets to a sequence on average, which matters for peptides of under 30 residues alone.

    Args:
        tokens_T: (T,) uint8, special tokens included.
        cu_seqlens: (N+1,) where each sequence starts.
        records_N: (N,) index of each sequence in its store.
        shares: how much is masked, and how.
        seed: of the run.
        epoch: from 0; validation gives the same one every time.

    Returns:
        (T,) uint8 inputs and (T,) uint8 targets, :data:`NO_TARGET` where nothing is to be predicted.
    """
    bits_T = _token_bits(cu_seqlens, records_N, seed, epoch)
    chosen_T = _chosen(bits_T, _is_residue(tokens_T), cu_seqlens, threshold(shares.masked))
    chosen = np.flatnonzero(chosen_T)
    targets_T = np.full(tokens_T.size, NO_TARGET, dtype=np.uint8)
    targets_T[chosen] = tokens_T[chosen]
    inputs_T = tokens_T.copy()
    inputs_T[chosen] = _replacements(tokens_T[chosen], splitmix64(bits_T[chosen]), shares)
    return inputs_T, targets_T


def _is_residue(tokens_T: Tokens) -> NDArray[np.bool_]:
    return (tokens_T >= FIRST_RESIDUE) & (tokens_T <= LAST_RESIDUE)


def _token_bits(cu_seqlens: NDArray[np.integer], records_N: NDArray[np.integer], seed: int, epoch: int) -> Bits:
    """(T,) random bits of each token."""
    lengths_N = np.diff(cu_seqlens)
    segments_T = np.repeat(np.arange(lengths_N.size), lengths_N)
    positions_T = np.arange(segments_T.size) - cu_seqlens[segments_T]
    return positional_bits(keyed_bits(_PURPOSE, seed, epoch, records_N), segments_T, positions_T)


def _chosen(
    bits_T: Bits, is_residue_T: NDArray[np.bool_], cu_seqlens: NDArray[np.integer], below: np.uint64
) -> NDArray[np.bool_]:
    """(T,) the residues whose bits are below the threshold, and the lowest of each sequence."""
    residue_bits_T = np.where(is_residue_T, bits_T, _NEVER)
    lowest_N = np.minimum.reduceat(residue_bits_T, cu_seqlens[:-1])
    lowest_T = np.repeat(lowest_N, np.diff(cu_seqlens))
    return is_residue_T & ((residue_bits_T < below) | (residue_bits_T == lowest_T))


def _replacements(tokens_M: Tokens, bits_M: Bits, shares: MaskingShares) -> Tokens:
    """(M,) what stands in place of each chosen token: <mask>, a random standard residue, or the token itself."""
    random_M = STANDARD_RESIDUES[(splitmix64(bits_M) % np.uint64(STANDARD_RESIDUES.size)).astype(np.intp)]
    masked_M = bits_M < threshold(shares.mask_token)
    drawn_M = ~masked_M & (bits_M < threshold(shares.mask_token + shares.random_token))
    return np.where(masked_M, np.uint8(MASK), np.where(drawn_M, random_M, tokens_M))
