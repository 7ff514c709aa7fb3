"""Pooling and light attention depend on the tokens of their own sequence only."""

import pytest
import torch
from torch.nn import functional

from esmeray.model.heads.pooling import LightAttention, pool
from tests.model.support import assert_near, batch_of_lengths, no_waiting, segments

COUNTS = [5, 0, 1, 40, 16, 0, 333, 17]


def segments_of_rows(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Features, scores and segments; no result may depend on the rows before, between and after the segments."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor(COUNTS)
    firsts = (counts + 3).cumsum(0) - counts
    rows = int(firsts[-1] + counts[-1]) + 4
    features, scores = (scale * torch.randn(rows, 13, generator=generator) for scale in (1, 1e3))
    outside = torch.ones(rows, 1, dtype=torch.bool)
    for first, count in zip(firsts, counts, strict=True):
        outside[first : first + count] = False
    return features.masked_fill(outside, 9e3).to(dtype), firsts, counts, scores.masked_fill(outside, 9e3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooled_is_each_segment_by_itself_in_fp32(dtype):
    features, firsts, counts, scores = segments_of_rows(dtype)
    for how in ("mean", "max", "attention"):
        pooled = pool(how, features, firsts, counts, scores if how == "attention" else None)
        assert pooled.dtype == torch.float32
        for number, count in enumerate(COUNTS):
            rows = slice(int(firsts[number]), int(firsts[number]) + count)
            values, weights = features[rows].double(), scores[rows].double().softmax(0)
            if count == 0:
                expected = torch.zeros(13, dtype=torch.float64)
            else:
                expected = {"mean": values.mean(0), "max": values.amax(0), "attention": (weights * values).sum(0)}[how]
            torch.testing.assert_close(pooled[number].double(), expected, rtol=2e-6, atol=1e-6)
        features_with_nan = features.clone()
        features_with_nan[firsts[3] + 20, 1] = torch.nan
        pooled = pool(how, features_with_nan, firsts, counts, scores if how == "attention" else None)
        assert pooled.isnan().nonzero().tolist() == [[3, 1]], "it reaches the vector of its segment alone"


@pytest.mark.cuda
def test_pooling_on_a_gpu_waits_for_nothing():
    arguments = [tensor.cuda() for tensor in segments_of_rows(torch.bfloat16)]
    with no_waiting():
        pooled = pool("attention", *arguments)
    expected = pool("attention", *segments_of_rows(torch.bfloat16))
    torch.testing.assert_close(pooled.cpu(), expected, rtol=1e-5, atol=1e-5)


CHANNELS = 6
RESIDUES = [5, 1, 40, 2, 12]
AROUND = [(1, 1), (0, 0), (0, 1)]


def of_the_paper(module: LightAttention, residues_LD: torch.Tensor) -> torch.Tensor:
    """The published forward pass for one sequence without special tokens: (2 D,)."""
    (kernel,) = module.feature_convolution.kernel_size
    x = functional.pad(residues_LD.t().unsqueeze(0), ((kernel - 1) // 2, kernel // 2))
    values, scores = module.feature_convolution(x), module.attention_convolution(x)
    attended = (values * functional.softmax(scores, dim=-1)).sum(-1)
    return torch.cat((attended, values.amax(-1)), dim=-1)[0]


@pytest.mark.parametrize("kernel", [1, 4, 9])
@pytest.mark.parametrize(("prefix", "suffix"), AROUND)
def test_packed_light_attention_equals_the_papers_for_each_sequence(kernel, prefix, suffix):
    torch.manual_seed(0)
    module = LightAttention(CHANNELS, kernel, 0.0, prefix, suffix)
    batch = batch_of_lengths([length + prefix + suffix for length in RESIDUES])
    features = torch.randn(batch.num_tokens, CHANNELS, requires_grad=True)
    weights = torch.randn(len(RESIDUES), 2 * CHANNELS)
    rows = [row[prefix : len(row) - suffix] for row in segments(features, batch)]
    expected = torch.stack([of_the_paper(module, row) for row in rows])
    pooled = module(features, batch)
    assert_near(pooled, expected)
    inputs = [features, *module.parameters()]
    ours = torch.autograd.grad((pooled * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    assert_near(ours, theirs)
