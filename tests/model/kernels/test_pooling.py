"""Pooling by the kernel and by its path in torch is that of each segment alone."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from model.kernels.pooling import pool, pool_in_torch
from tests.conftest import REPOSITORY

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
POOLINGS = ["mean", "max", "attention"]
COUNTS = [5, 0, 1, 40, 16, 0, 333, 17]


def given(dtype: torch.dtype, channels: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Features and scores, and segments with rows before, between and after them that no result may depend on."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor(COUNTS)
    firsts = (counts + 3).cumsum(0) - counts
    rows = int(firsts[-1] + counts[-1]) + 4
    features, scores = (scale * torch.randn(rows, channels, generator=generator) for scale in (1, 30))
    outside = torch.ones(rows, 1, dtype=torch.bool)
    for first, count in zip(firsts, counts, strict=True):
        outside[first : first + count] = False
    drawn = (features.masked_fill(outside, 9e3).to(dtype), firsts, counts, scores.masked_fill(outside, 9e3).to(dtype))
    return tuple(tensor.to(device) for tensor in drawn)


def check(pooling: Callable[..., torch.Tensor], device: str = "cpu", channels: int = 130) -> None:
    for how in POOLINGS:
        for dtype in DTYPES:
            features, firsts, counts, scores = given(dtype, channels, device)
            found = pooling(how, features, firsts, counts, scores if how == "attention" else None, dtype)
            assert found.dtype == dtype and found.shape == (len(COUNTS), channels)
            for place, count in enumerate(COUNTS):
                rows = slice(int(firsts[place]), int(firsts[place]) + count)
                values, weights = features[rows].double(), scores[rows].double().softmax(0)
                if count == 0:
                    expected = torch.zeros(channels, device=device)
                else:
                    expected = {"mean": values.mean(0), "max": values.amax(0), "attention": (weights * values).sum(0)}[
                        how
                    ]
                least = 1e-6 if dtype == torch.float32 else 0.51 * torch.finfo(dtype).eps  # rounded once
                torch.testing.assert_close(found[place].double(), expected.double(), rtol=2 * least, atol=1e-6)


def check_not_finite(pooling: Callable[..., torch.Tensor], device: str = "cpu") -> None:
    """NaN reaches the result, as who looks for it there expects."""
    features, firsts, counts, scores = given(torch.float32, 3, device)
    features[firsts[3] + 20, 1] = torch.nan
    for how in POOLINGS:
        found = pooling(how, features, firsts, counts, scores if how == "attention" else None, torch.float32)
        assert found.isnan().nonzero().tolist() == [[3, 1]], how


def test_pooled_in_torch_is_each_segment_by_itself():
    check(pool)
    check_not_finite(pool)


def test_no_segments_and_no_rows_are_pooled():
    none = torch.zeros(0, dtype=torch.int64)
    assert pool("mean", torch.zeros(4, 3), none, none).shape == (0, 3)
    assert pool("max", torch.zeros(0, 3), *torch.zeros(2, 1, dtype=torch.int64)).tolist() == [[0, 0, 0]]


@pytest.mark.cuda
def test_pooled_on_a_gpu_is_each_segment_by_itself_and_nothing_waits():
    check(pool, "cuda", 1280)
    check_not_finite(pool, "cuda")
    features, firsts, counts, scores = given(torch.bfloat16, 128, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = pool("attention", features, firsts, counts, scores)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found, pool_in_torch("attention", features, firsts, counts, scores, torch.float32))


@pytest.mark.cuda
def test_gradients_are_torchs_on_a_gpu():
    features, firsts, counts, _ = given(torch.float32, 8, "cuda")
    pool("mean", features.requires_grad_(), firsts, counts).sum().backward()
    assert features.grad.sum().item() == pytest.approx(8 * sum(count > 0 for count in COUNTS))


def test_pooled_under_tritons_interpreter_is_each_segment_by_itself():
    pytest.importorskip("triton", reason="needs Triton, which the CPU build of torch leaves out")
    code = "from tests.model.kernels.test_pooling import interpreted; interpreted()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def interpreted() -> None:
    """In a process of its own: Triton decides between interpreter and compiler when it is imported."""
    from model.kernels import pooling_triton

    check(pooling_triton.pool)
    check_not_finite(pooling_triton.pool)
