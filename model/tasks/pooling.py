"""From one vector a token to one vector a sequence.

In: packed features. Out: fp32, by operations on segments that never wait for a CUDA device. What a tokenizer puts
before and after each sequence is no part of it: how many tokens that is, is an argument (<cls> and <eos> of ESM-2 by
default; 0 and 0 take all tokens).

Shape legend: T tokens in the batch, N sequences, D channels.
"""

import torch
from torch import Tensor

from dataset.packed_batch import PackedBatch
from model.kernels.pooling import pool


def mean_over_residues(features_TD: Tensor, batch: PackedBatch, num_prefix: int = 1, num_suffix: int = 1) -> Tensor:
    """The mean of each sequence's residues; <cls> and <eos> are left out, as in fair-esm's extract script.

    Sums are taken in fp32. Returns (N, D) fp32; zeros for a sequence without residues.
    """
    return pool("mean", features_TD, *residues_of(batch, num_prefix, num_suffix))


def max_over_residues(features_TD: Tensor, batch: PackedBatch, num_prefix: int = 1, num_suffix: int = 1) -> Tensor:
    """The largest value of each channel among each sequence's residues; equal ones share the gradient.

    Returns (N, D) fp32; zeros for a sequence without residues.
    """
    return pool("max", features_TD, *residues_of(batch, num_prefix, num_suffix))


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
    firsts_N, counts_N = residues_of(batch, num_prefix, num_suffix)
    ends_T = (firsts_N - batch.cu_seqlens[:-1] + counts_N)[batch.segment_ids()]
    return (batch.positions >= num_prefix) & (batch.positions < ends_T)


def residues_of(batch: PackedBatch, num_prefix: int = 1, num_suffix: int = 1) -> tuple[Tensor, Tensor]:
    """(N,) int64 each: the place of the first residue of a sequence, and how many residues it has.

    A filler may be shorter than the special tokens; then it has no residues.
    """
    lengths_N = batch.cu_seqlens.long().diff()
    prefix_N = lengths_N.clamp(max=num_prefix)
    return batch.cu_seqlens[:-1] + prefix_N, (lengths_N - prefix_N - num_suffix).clamp(min=0)


def _rows(features_TD: Tensor, places_N: Tensor, batch: PackedBatch) -> Tensor:
    """(N, D) fp32: these rows; zeros for a sequence without tokens, whose place is its neighbour's."""
    rows_ND = features_TD.index_select(0, places_N.clamp(0, batch.num_tokens - 1)).float()
    return torch.where((batch.cu_seqlens.diff() > 0).unsqueeze(1), rows_ND, 0.0)
