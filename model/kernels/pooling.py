"""Pooling of packed rows, a vector a segment: mean, maximum, or mean under the softmax of a score for each channel.

Computed in fp32 without waiting for the device: on CUDA by a Triton kernel (:mod:`model.kernels.pooling_triton`) that
reads features in their own type, unless gradients are wanted; else by torch, from a copy in fp32.

Shape legend: T rows, N segments in ascending order, which don't overlap but may leave rows between them, D channels.
"""

from functools import partial
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Pooling: TypeAlias = Literal["mean", "max", "attention"]
_HAS_TRITON = find_spec("triton") is not None


def pool(
    how: Pooling,
    features_TD: Tensor,
    firsts_N: Tensor,
    counts_N: Tensor,
    scores_TD: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(N, D), zeros for segments without rows. ``firsts_N``, ``counts_N``: int64; ``scores_TD``: of ``attention``."""
    differentiable = features_TD.requires_grad or (scores_TD is not None and scores_TD.requires_grad)
    path = pool_in_torch
    if features_TD.is_cuda and _HAS_TRITON and not (differentiable and torch.is_grad_enabled()):
        from model.kernels.pooling_triton import pool as path  # here: a CPU build of torch has no Triton
    return path(how, features_TD, firsts_N, counts_N, scores_TD, dtype)


def pool_in_torch(
    how: str, features_TD: Tensor, firsts_N: Tensor, counts_N: Tensor, scores_TD: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The same on any device, with gradients. Other rows are segments too, every second one: nothing is masked."""
    edges = torch.stack((firsts_N, firsts_N + counts_N), 1).flatten()
    lengths = edges.diff(prepend=edges.new_zeros(1), append=edges.new_full((1,), len(features_TD)))
    reduced = partial(torch.segment_reduce, lengths=lengths, unsafe=True)
    features_TD, counts_N1 = features_TD.float(), counts_N.unsqueeze(1)
    if how == "max":
        pooled_ND = torch.where(counts_N1 > 0, reduced(features_TD, "max")[1::2], 0.0)
    elif scores_TD is None:
        pooled_ND = reduced(features_TD, "sum")[1::2] / counts_N1.clamp(min=1)
    else:
        largest = reduced(scores_TD.detach().float(), "max")
        largest_TD = largest.repeat_interleave(lengths, 0, output_size=len(scores_TD))
        weights_TD = (scores_TD.float() - largest_TD).exp()
        totals_ND = reduced(weights_TD, "sum")[1::2]  # at least 1, or 0 without rows
        pooled_ND = reduced(weights_TD * features_TD, "sum")[1::2] / totals_ND.clamp(min=0.5)
    return pooled_ND.to(dtype)
