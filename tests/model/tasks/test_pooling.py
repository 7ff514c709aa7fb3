"""Pooling looks at what belongs to each sequence, and at nothing else."""

import pytest
import torch

from dataset.packed_batch import PackedBatch
from dataset.tokens.esm import pack_sequences
from model.tasks.pooling import first_token, last_token, max_over_residues, mean_over_residues, residue_mask
from tests.model.support import assert_near, batch_of_lengths, segments

RAGGED = [5, 1, 40, 2]
AROUND = [(1, 1), (0, 0), (0, 1), (2, 1)]
ALONE = {mean_over_residues: lambda residues: residues.mean(0), max_over_residues: lambda residues: residues.amax(0)}


def residues_of(features: torch.Tensor, batch: PackedBatch, prefix: int, suffix: int) -> list[torch.Tensor]:
    return [rows[prefix : len(rows) - suffix] for rows in segments(features, batch)]


@pytest.mark.parametrize("pool", ALONE)
@pytest.mark.parametrize(("prefix", "suffix"), AROUND)
def test_pooled_packed_equals_one_at_a_time(pool, prefix, suffix):
    batch = batch_of_lengths([length + prefix + suffix for length in RAGGED])
    features = torch.randn(batch.num_tokens, 7, requires_grad=True)
    weights = torch.randn(len(RAGGED), 7)
    expected = torch.stack([ALONE[pool](rows) for rows in residues_of(features, batch, prefix, suffix)])
    pooled = pool(features, batch, prefix, suffix)
    assert_near(pooled, expected)
    gradients = [torch.autograd.grad((result * weights).sum(), features)[0] for result in (pooled, expected)]
    assert_near(*gradients)


@pytest.mark.parametrize("pool", ALONE)
@pytest.mark.parametrize("lengths", [[1], [2], [1, 7, 2]])
def test_a_sequence_without_residues_is_zero_and_gets_no_gradient(pool, lengths):
    batch = batch_of_lengths(lengths)
    features = torch.randn(batch.num_tokens, 3, requires_grad=True)
    pooled = pool(features, batch)
    pooled.sum().backward()
    empty = torch.tensor(lengths) < 3
    assert pooled[empty].eq(0).all()
    assert features.grad[empty[batch.segment_ids()]].eq(0).all() and features.grad.isfinite().all()


def test_first_and_last_token_are_those_of_each_sequence():
    batch = batch_of_lengths(RAGGED)
    features = torch.randn(batch.num_tokens, 4)
    rows = segments(features, batch)
    assert torch.equal(first_token(features, batch), torch.stack([row[0] for row in rows]))
    assert torch.equal(last_token(features, batch), torch.stack([row[-1] for row in rows]))


@pytest.mark.parametrize("pool", [first_token, last_token])
@pytest.mark.parametrize("lengths", [[0, 3], [3, 0], [2, 0, 2]])
def test_a_sequence_without_tokens_takes_none_of_its_neighbours(pool, lengths):
    pooled = pool(torch.ones(sum(lengths), 2), batch_of_lengths(lengths))
    assert pooled[:, 0].tolist() == [float(length > 0) for length in lengths]


@pytest.mark.parametrize(("prefix", "suffix"), AROUND)
def test_the_residue_mask_leaves_out_what_stands_around_the_residues(prefix, suffix):
    batch = batch_of_lengths([prefix + suffix + length for length in RAGGED])
    mask = residue_mask(batch, prefix, suffix)
    for length, row in zip(RAGGED, segments(mask, batch), strict=True):
        assert row.tolist() == [False] * prefix + [True] * length + [False] * suffix


@pytest.mark.parametrize("pool", [mean_over_residues, max_over_residues, first_token, last_token])
def test_half_precision_is_pooled_in_fp32(pool):
    batch = pack_sequences(["A" * 1000, "E"])
    features = torch.randn(batch.num_tokens, 2).bfloat16()
    assert torch.equal(pool(features, batch), pool(features.float(), batch))
