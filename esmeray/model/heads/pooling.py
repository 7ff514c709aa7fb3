"""From one vector a token to one vector a sequence.

In: packed features. Out: fp32, by operations on segments that never wait for a CUDA device. What a tokenizer puts
before and after each sequence is no part of it: how many tokens that is, is an argument (<cls> and <eos> of ESM-2 by
default; 0 and 0 take all tokens). Zeros for a sequence without residues, or without tokens.

Shape legend: T tokens in the batch, N sequences, D channels.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from esmeray.dataset.packed_batch import PackedBatch


def mean_over_residues(features_TD: Tensor, batch: PackedBatch, num_prefix: int = 1, num_suffix: int = 1) -> Tensor:
    """(N, D) fp32: the mean of each sequence's residues without <cls> and <eos>, as in fair-esm's extract script."""
    return pool("mean", features_TD, *residues_of(batch, num_prefix, num_suffix))


def max_over_residues(features_TD: Tensor, batch: PackedBatch, num_prefix: int = 1, num_suffix: int = 1) -> Tensor:
    """(N, D) fp32: the largest value of each channel among each sequence's residues; equal ones share the gradient."""
    return pool("max", features_TD, *residues_of(batch, num_prefix, num_suffix))


def first_token(features_TD: Tensor, batch: PackedBatch) -> Tensor:
    """(N, D) fp32: the first token of each sequence, which is <cls> where the tokenizer puts one."""
    return _rows(features_TD, batch.cu_seqlens[:-1].long(), batch)


def last_token(features_TD: Tensor, batch: PackedBatch) -> Tensor:
    """(N, D) fp32: the last token of each sequence, which in a decoder alone has seen the whole sequence."""
    return _rows(features_TD, batch.cu_seqlens[1:].long() - 1, batch)


def residue_mask(batch: PackedBatch, num_prefix: int = 1, num_suffix: int = 1) -> Tensor:
    """(T,) bool: which tokens are residues, and not what the tokenizer puts around them."""
    firsts_N, counts_N = residues_of(batch, num_prefix, num_suffix)
    ends_T = (firsts_N - batch.cu_seqlens[:-1] + counts_N)[batch.segment_ids()]
    return (batch.positions >= num_prefix) & (batch.positions < ends_T)


def residues_of(batch: PackedBatch, num_prefix: int = 1, num_suffix: int = 1) -> tuple[Tensor, Tensor]:
    """(N,) int64 each: the row of the first residue of a sequence, and how many residues it has.

    A filler may be shorter than the special tokens; then it has no residues.
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
    """(N, D) fp32: mean, maximum, or mean under the softmax of a score for each channel, of segments of rows.

    ``firsts_N``, ``counts_N``: int64, ascending segments, which may leave rows between them. ``scores_TD``: of
    ``attention``. Other rows are segments too, every second one: nothing is masked.
    """
    # By lengths of all stretches, in and between segments: segment_reduce takes nothing else, and no loop is needed.
    edges = torch.stack((firsts_N, firsts_N + counts_N), 1).flatten()
    lengths = edges.diff(prepend=edges.new_zeros(1), append=edges.new_full((1,), len(features_TD)))
    reduced = partial(torch.segment_reduce, lengths=lengths, unsafe=True)  # its checks would wait for the device
    features_TD, counts_N1 = features_TD.float(), counts_N.unsqueeze(1)
    if how == "max":
        return torch.where(counts_N1 > 0, reduced(features_TD, "max")[1::2], 0.0)
    if scores_TD is None:
        return reduced(features_TD, "sum")[1::2] / counts_N1.clamp(min=1)
    # Against overflow alone: the softmax is the same without, so that no gradient passes here.
    largest = reduced(scores_TD.detach().float(), "max")
    largest_TD = largest.repeat_interleave(lengths, 0, output_size=len(scores_TD))
    weights_TD = (scores_TD.float() - largest_TD).exp()
    totals_ND = reduced(weights_TD, "sum")[1::2]  # at least 1, or 0 without rows
    return reduced(weights_TD * features_TD, "sum")[1::2] / totals_ND.clamp(min=0.5)


def _rows(features_TD: Tensor, rows_N: Tensor, batch: PackedBatch) -> Tensor:
    """(N, D) fp32: these rows; zeros for a sequence without tokens, whose row is its neighbour's."""
    rows_ND = features_TD.index_select(0, rows_N.clamp(0, batch.num_tokens - 1)).float()
    return torch.where((batch.cu_seqlens.diff() > 0).unsqueeze(1), rows_ND, 0.0)
