"""Light attention is that of the paper for each sequence by itself."""

import pytest
import torch
from torch.nn import functional

from esmeray.model.heads.heads import LightAttention
from tests.model.support import assert_near, batch_of_lengths, segments

CHANNELS = 6
RAGGED = [5, 1, 40, 2, 12]
AROUND = [(1, 1), (0, 0), (0, 1)]


def light_attention(kernel: int = 9, prefix: int = 1, suffix: int = 1, dropout: float = 0.0) -> LightAttention:
    torch.manual_seed(0)
    return LightAttention(CHANNELS, kernel, dropout, prefix, suffix)


def of_the_paper(module: LightAttention, residues_LD: torch.Tensor) -> torch.Tensor:
    """(2 D,): the published forward for one sequence without special tokens."""
    (kernel,) = module.feature_convolution.kernel_size
    x = functional.pad(residues_LD.t().unsqueeze(0), ((kernel - 1) // 2, kernel // 2))
    values, scores = module.feature_convolution(x), module.attention_convolution(x)
    attended = (values * functional.softmax(scores, dim=-1)).sum(-1)
    return torch.cat((attended, values.amax(-1)), dim=-1)[0]


@pytest.mark.parametrize("kernel", [1, 4, 9])
@pytest.mark.parametrize(("prefix", "suffix"), AROUND)
def test_packed_light_attention_is_that_of_the_paper_for_each_sequence(kernel, prefix, suffix):
    module = light_attention(kernel, prefix, suffix)
    batch = batch_of_lengths([length + prefix + suffix for length in RAGGED])
    features = torch.randn(batch.num_tokens, CHANNELS, requires_grad=True)
    weights = torch.randn(len(RAGGED), 2 * CHANNELS)
    rows = [row[prefix : len(row) - suffix] for row in segments(features, batch)]
    expected = torch.stack([of_the_paper(module, row) for row in rows])
    pooled = module(features, batch)
    assert_near(pooled, expected)
    inputs = [features, *module.parameters()]
    ours = torch.autograd.grad((pooled * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    assert_near(ours, theirs)


@pytest.mark.parametrize("lengths", [[1], [2], [2, 9, 1]])
def test_scores_of_any_size_give_a_softmax_and_no_residues_zeros_that_reach_every_weight(lengths):
    module, batch = light_attention(), batch_of_lengths(lengths)
    pooled = module(1e4 * torch.randn(batch.num_tokens, CHANNELS), batch)
    assert pooled.isfinite().all()
    empty = torch.tensor(lengths) < 3
    pooled[empty].sum().backward()
    assert pooled[empty].eq(0).all()
    assert all(p.grad is not None and p.grad.eq(0).all() for p in module.parameters())
