"""From one vector a token to one vector a protein.

Shape legend: T tokens in the batch, N sequences, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dataset.packed_batch import PackedBatch
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE


def mean_over_residues(features_TD: Tensor, batch: PackedBatch) -> Tensor:
    """The mean of each sequence's residues; <cls> and <eos> are left out, as in fair-esm's extract script.

    Sums are taken in fp32, in the order of the tokens, and nothing waits for the device.

    Args:
        features_TD: (T, D), one row for each token of the batch.

    Returns:
        (N, D) fp32; zeros for a sequence without residues.
    """
    bounds = batch.cu_seqlens.long()
    special = torch.cat((bounds[:-1], bounds[1:] - 1))
    residues_TD = features_TD.float().index_fill(0, special, 0.0)
    lengths_N = bounds[1:] - bounds[:-1]
    sums_ND = torch.segment_reduce(residues_TD, "sum", lengths=lengths_N, unsafe=True)
    return sums_ND / (lengths_N - SPECIAL_TOKENS_PER_SEQUENCE).clamp(min=1).unsqueeze(1)
