"""Pooling takes the mean of the residues of each sequence, and of nothing else."""

from __future__ import annotations

import torch

from dataset.tokenizer import pack_sequences
from model.pooling import mean_over_residues
from tests.model.support import random_sequences, segments


def test_the_mean_is_over_the_residues_of_each_sequence():
    batch = pack_sequences(random_sequences([5, 1, 40]))
    features = torch.randn(batch.num_tokens, 7)
    expected = torch.stack([rows[1:-1].mean(0) for rows in segments(features, batch)])
    torch.testing.assert_close(mean_over_residues(features, batch), expected)


def test_sums_of_half_precision_are_taken_in_fp32():
    batch = pack_sequences(["A" * 1000])
    features = torch.full((batch.num_tokens, 1), 1.0, dtype=torch.bfloat16)
    pooled = mean_over_residues(features, batch)
    assert pooled.dtype == torch.float32 and pooled.item() == 1.0


def test_a_sequence_without_residues_is_zero_and_not_nan():
    batch = pack_sequences(["", "AC"])
    pooled = mean_over_residues(torch.ones(batch.num_tokens, 3), batch)
    assert pooled.tolist() == [[0.0] * 3, [1.0] * 3]


def test_special_tokens_get_no_gradient():
    batch = pack_sequences(["ACD", "EF"])
    features = torch.randn(batch.num_tokens, 2, requires_grad=True)
    mean_over_residues(features, batch).sum().backward()
    shares = [0, 1 / 3, 1 / 3, 1 / 3, 0, 0, 0.5, 0.5, 0]
    torch.testing.assert_close(features.grad[:, 0], torch.tensor(shares))
