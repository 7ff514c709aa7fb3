"""From one vector a token to one vector a sequence.

In: packed features. Out: fp32, by operations on segments that never wait for a CUDA device. What a tokenizer puts
before and after each sequence is no part of it: how many tokens that is, is an argument (<cls> and <eos> of ESM-2 by
default; 0 and 0 take all tokens).

Shape legend: T tokens in the batch, N sequences, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dataset.packed_batch import PackedBatch


def mean_over_residues(features_TD: Tensor, batch: PackedBatch, num_prefix: int = 1, num_suffix: int = 1) -> Tensor:
    """The mean of each sequence's residues; <cls> and <eos> are left out, as in fair-esm's extract script.

    Sums are taken in fp32, in the order of the tokens. Returns (N, D) fp32; zeros for a sequence without residues.
    """
    sums_ND, counts_N = _reduce(features_TD, batch, num_prefix, num_suffix, "sum")
    return sums_ND / counts_N.clamp(min=1).unsqueeze(1)


def max_over_residues(features_TD: Tensor, batch: PackedBatch, num_prefix: int = 1, num_suffix: int = 1) -> Tensor:
    """The largest value of each channel among each sequence's residues; equal ones share the gradient.

    Returns (N, D) fp32; zeros for a sequence without residues.
    """
    largest_ND, counts_N = _reduce(features_TD, batch, num_prefix, num_suffix, "max")
    return torch.where((counts_N > 0).unsqueeze(1), largest_ND, 0.0)


def sum_over_residues(features_TD: Tensor, batch: PackedBatch, num_prefix: int = 1, num_suffix: int = 1) -> Tensor:
    """(N, D) fp32: the sum of each sequence's residues, taken in their order; zeros where there are none."""
    return _reduce(features_TD, batch, num_prefix, num_suffix, "sum")[0]


def first_token(features_TD: Tensor, batch: PackedBatch) -> Tensor:
    """(N, D) fp32: the first token of each sequence, which is <cls> where the tokenizer puts one; zeros without any."""
    return _rows(features_TD, batch.cu_seqlens[:-1].long(), batch)


def last_token(features_TD: Tensor, batch: PackedBatch) -> Tensor:
    """(N, D) fp32: the last token of each sequence, <eos> where the tokenizer puts one; zeros without any.

    In a decoder it alone has seen the whole sequence.
    """
    return _rows(features_TD, batch.cu_seqlens[1:].long() - 1, batch)


def residue_mask(batch: PackedBatch, num_prefix: int = 1, num_suffix: int = 1) -> Tensor:
    """(T,) bool: which tokens are residues, and not what the tokenizer puts around them."""
    prefix_N, counts_N, _ = _residue_counts(batch, num_prefix, num_suffix)
    ends_T = (prefix_N + counts_N)[batch.segment_ids()]
    return (batch.positions >= num_prefix) & (batch.positions < ends_T)


def _residue_counts(batch: PackedBatch, num_prefix: int, num_suffix: int) -> tuple[Tensor, Tensor, Tensor]:
    """(N,) int64 each: special tokens before the residues, residues, and special tokens after them.

    A filler may be shorter than the special tokens; then it has no residues.
    """
    lengths_N = batch.cu_seqlens.long().diff()
    prefix_N = lengths_N.clamp(max=num_prefix)
    suffix_N = (lengths_N - prefix_N).clamp(max=num_suffix)
    return prefix_N, lengths_N - prefix_N - suffix_N, suffix_N


def _reduce(
    features_TD: Tensor, batch: PackedBatch, num_prefix: int, num_suffix: int, how: str
) -> tuple[Tensor, Tensor]:
    """(N, D) fp32 of the residues of each sequence, and (N,) how many they are.

    Each sequence is three segments, of which the one in the middle is kept: so features need no masked copy.
    """
    prefix_N, counts_N, suffix_N = _residue_counts(batch, num_prefix, num_suffix)
    lengths_3N = torch.stack((prefix_N, counts_N, suffix_N), 1).flatten()
    return torch.segment_reduce(features_TD.float(), how, lengths=lengths_3N, unsafe=True)[1::3], counts_N


def _rows(features_TD: Tensor, places_N: Tensor, batch: PackedBatch) -> Tensor:
    """(N, D) fp32: these rows; zeros for a sequence without tokens, whose place is its neighbour's."""
    rows_ND = features_TD.index_select(0, places_N.clamp(0, batch.num_tokens - 1)).float()
    return torch.where((batch.cu_seqlens.diff() > 0).unsqueeze(1), rows_ND, 0.0)
