"""Pooling of one vector per token to one vector per sequence.

Functions take packed features and return fp32, by segment operations that do not synchronize with a CUDA device.
Special tokens before and after each sequence are left out; their numbers are arguments (by default <cls> and <eos> of
ESM-2; 0 and 0 use all tokens). Sequences without residues or tokens get zeros.

Shape legend: T tokens in the batch, N sequences, D channels.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from esmeray.dataset.packed_batch import PackedBatch


def mean_over_residues(features_TD: Tensor, batch: PackedBatch, num_prefix: int = 1, num_suffix: int = 1) -> Tensor:
    """Return (N, D) fp32 means over residues, without <cls> and <eos>, as in fair-esm's extract script."""
    return pool("mean", features_TD, *residues_of(batch, num_prefix, num_suffix))


def max_over_residues(features_TD: Tensor, batch: PackedBatch, num_prefix: int = 1, num_suffix: int = 1) -> Tensor:
    """Return (N, D) fp32 maxima over residues per channel. Equal values share the gradient."""
    return pool("max", features_TD, *residues_of(batch, num_prefix, num_suffix))


def first_token(features_TD: Tensor, batch: PackedBatch) -> Tensor:
    """Return (N, D) fp32 vectors of the first token of each sequence: <cls>, if the tokenizer adds one."""
    return _rows(features_TD, batch.cu_seqlens[:-1].long(), batch)


def last_token(features_TD: Tensor, batch: PackedBatch) -> Tensor:
    """Return (N, D) fp32 vectors of the last token, the only one that sees the whole sequence in a decoder."""
    return _rows(features_TD, batch.cu_seqlens[1:].long() - 1, batch)


def residue_mask(batch: PackedBatch, num_prefix: int = 1, num_suffix: int = 1) -> Tensor:
    """Return (T,) bool, true for residues and false for special tokens."""
    firsts_N, counts_N = residues_of(batch, num_prefix, num_suffix)
    ends_T = (firsts_N - batch.cu_seqlens[:-1] + counts_N)[batch.segment_ids()]
    return (batch.positions >= num_prefix) & (batch.positions < ends_T)


def residues_of(batch: PackedBatch, num_prefix: int = 1, num_suffix: int = 1) -> tuple[Tensor, Tensor]:
    """Return (N,) int64 rows of the first residue of each sequence, and (N,) int64 numbers of residues.

    A filler may be shorter than the special tokens; it then has no residues.
    """
    lengths_N = batch.cu_seqlens.long().diff()
    prefix_N = lengths_N.clamp(max=num_prefix)
    return batch.cu_seqlens[:-1] + prefix_N, (lengths_N - prefix_N - num_suffix).clamp(min=0)


def pool(
    how: Literal["mean", "max", "attention"],
    features_TD: Tensor,
    firsts_N: Tensor,
    counts_N: Tensor,
    scores_TD: Tensor | None = None,
) -> Tensor:
    """Return (N, D) fp32 means or maxima of segments of rows, or means weighted by the softmax of scores per channel.

    ``firsts_N``, ``counts_N``: int64, ascending segments, with or without rows between them. ``scores_TD``: scores for
    ``attention``.
    """
    # segment_reduce takes the lengths of consecutive segments, so rows between segments become segments, too: every
    # second one. Their results are dropped, and no mask is needed.
    edges = torch.stack((firsts_N, firsts_N + counts_N), 1).flatten()
    lengths = edges.diff(prepend=edges.new_zeros(1), append=edges.new_full((1,), len(features_TD)))
    reduced = partial(torch.segment_reduce, lengths=lengths, unsafe=True)  # unsafe=True skips checks that synchronize
    features_TD, counts_N1 = features_TD.float(), counts_N.unsqueeze(1)
    if how == "max":
        return torch.where(counts_N1 > 0, reduced(features_TD, "max")[1::2], 0.0)
    if scores_TD is None:
        return reduced(features_TD, "sum")[1::2] / counts_N1.clamp(min=1)
    # Subtract the maximum to prevent overflow. The softmax does not change, so no gradient is needed.
    largest = reduced(scores_TD.detach().float(), "max")
    largest_TD = largest.repeat_interleave(lengths, 0, output_size=len(scores_TD))
    weights_TD = (scores_TD.float() - largest_TD).exp()
    totals_ND = reduced(weights_TD, "sum")[1::2]  # at least 1, or 0 without rows
    return reduced(weights_TD * features_TD, "sum")[1::2] / totals_ND.clamp(min=0.5)


def _rows(features_TD: Tensor, rows_N: Tensor, batch: PackedBatch) -> Tensor:
    """Return (N, D) fp32 rows, zeros for a sequence without tokens, whose row belongs to another sequence."""
    rows_ND = features_TD.index_select(0, rows_N.clamp(0, batch.num_tokens - 1)).float()
    return torch.where((batch.cu_seqlens.diff() > 0).unsqueeze(1), rows_ND, 0.0)
