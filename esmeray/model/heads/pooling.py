"""Pooling of one vector per token to one vector per sequence, without weights or with trainable ones.

All take packed features and return fp32, by segment operations that do not synchronize with a CUDA device.
Special tokens before and after each sequence are left out; their numbers are arguments (by default <cls> and <eos> of
ESM-2; 0 and 0 use all tokens). Sequences without residues or tokens get zeros.

Shape legend: T tokens in the batch, N sequences, S rows with gaps between the sequences, D channels.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

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


class LightAttention(nn.Module):
    """Light attention pooling (Stärk et al. 2021, doi:10.1093/bioadv/vbab035; HannesStark/protein-localization).

    Two convolutions over each sequence give every residue a value and a score per channel. The output is the
    concatenation of the values' mean, weighted by the softmax of the scores, and their maximum. Like the paper,
    the class leaves out special tokens: the convolutions see zeros instead, as beyond the ends of a sequence.
    ``kernel``: size of the convolutions in tokens; an even kernel extends one token further to the right than to the
    left.
    """

    def __init__(self, channels: int, kernel: int, dropout: float, num_prefix: int = 1, num_suffix: int = 1) -> None:
        super().__init__()
        self.feature_convolution = nn.Conv1d(channels, channels, kernel)  # padded by the gaps of forward
        self.attention_convolution = nn.Conv1d(channels, channels, kernel)
        self.dropout = nn.Dropout(dropout)
        self.num_prefix, self.num_suffix = num_prefix, num_suffix

    def forward(self, features_TD: Tensor, batch: PackedBatch) -> Tensor:
        """Return (N, 2 D) fp32, zeros for a sequence without residues. Does not synchronize with the device."""
        segments_T = batch.segment_ids()
        residue_T1 = residue_mask(batch, self.num_prefix, self.num_suffix).unsqueeze(1)
        # Separate sequences by enough zeros that no convolution reaches a neighbour, and pad both ends.
        (kernel,) = self.feature_convolution.kernel_size
        gap = kernel // 2
        rows_T = torch.arange(batch.num_tokens, device=segments_T.device) + gap * segments_T
        rows = batch.num_tokens + gap * (batch.num_sequences - 1) + kernel - 1
        # torch.where instead of a product, so that a NaN in a special token is removed.
        inputs_TD = torch.where(residue_T1, features_TD, 0.0).to(self.feature_convolution.weight.dtype)
        inputs_SD = inputs_TD.new_zeros(rows, inputs_TD.shape[1]).index_copy(0, rows_T + (kernel - 1) // 2, inputs_TD)
        values_TD = self.dropout(_convolve(self.feature_convolution, inputs_SD, rows_T))
        scores_TD = _convolve(self.attention_convolution, inputs_SD, rows_T)
        residues = residues_of(batch, self.num_prefix, self.num_suffix)
        return torch.cat((pool("attention", values_TD, *residues, scores_TD), pool("max", values_TD, *residues)), dim=1)


def _convolve(convolution: nn.Conv1d, inputs_SD: Tensor, rows_T: Tensor) -> Tensor:
    return convolution(inputs_SD.t().unsqueeze(0)).squeeze(0).t().index_select(0, rows_T).float()
