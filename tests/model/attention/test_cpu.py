"""The compiled attention equals attention within each sequence, forward and backward, up to the dtype's rounding."""

import platform
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from esmeray.common import compiled_code
from esmeray.model.attention.cpu import cpu_attention, kernel_takes
from esmeray.model.backbones.esm2 import rotary_tables, rotate

LENGTHS = [5, 1, 64, 130, 17, 16, 200]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""Relative error of the norm: a few roundings of the dtype."""

pytestmark = pytest.mark.skipif(not kernel_takes(torch.empty(1, 1, 8), torch.empty(1, 1, 8)), reason="no C++ compiler")


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def heads(lengths: list[int], head: int, dtype=torch.float32, count: int = 4, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(sum(lengths), 3, head, generator=generator).to(dtype) for _ in range(count)]


def reference(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float) -> Tensor:
    """Attention per sequence, in fp64."""
    parts = zip(*(x.double().transpose(0, 1).split(lengths, dim=1) for x in (query, key, value)), strict=True)
    outputs = [functional.scaled_dot_product_attention(*part, scale=scaling) for part in parts]
    return torch.cat(outputs, dim=1).transpose(0, 1)


def rotated(x_THd: Tensor, lengths: list[int]) -> Tensor:
    tables = rotary_tables(frequencies(x_THd.shape[-1]), max(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return rotate(x_THd, *(table[positions].unsqueeze(1) for table in tables))


def frequencies(head: int) -> Tensor:
    return 10_000.0 ** (-torch.arange(0, head, 2) / head)


def error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("head", [8, 24])  # each is compiled: less than a vector, and no multiple of one
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "rotary"])
def test_output_and_gradients_equal_fp64(dtype, head, turned):
    *inputs, d_out = heads(LENGTHS, head, dtype)
    exact = [x.double().requires_grad_() for x in inputs]
    query, key, value = exact
    if turned:  # rotate() works in fp32, which is exact enough here
        query, key = (rotated(x.float(), LENGTHS).double() for x in exact[:2])
    expected = reference(query, key, value, LENGTHS, 0.3)
    expected.backward(d_out.double())
    ours = [x.clone().requires_grad_() for x in inputs]
    tables = rotary_tables(frequencies(head), max(LENGTHS)) if turned else None
    out = cpu_attention(*ours, offsets(LENGTHS), 0.3, tables)
    out.backward(d_out)
    tolerance = TOLERANCES[dtype]
    assert out.dtype == dtype and error(out.detach(), expected.detach()) < tolerance
    for tensor, exactly in zip(ours, exact, strict=True):
        assert error(tensor.grad, exactly.grad) < tolerance


def run(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Output and gradients."""
    *inputs, d_out = heads(LENGTHS, 8, dtype)
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = cpu_attention(*leaves, offsets(LENGTHS), 0.3)
    out.backward(d_out)
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a kind of x86 processor")
@pytest.mark.parametrize("flags", [("-march=x86-64-v3",), ("-march=native", "-mno-amx-bf16")], ids=" ".join)
def test_a_processor_without_avx512_or_amx_gets_the_same(monkeypatch, tmp_path, flags):
    if len(flags) > 1 and "amx_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("without AMX this is what is compiled anyway")
    here = {dtype: run(dtype) for dtype in TOLERANCES}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled_code, "_MACHINE_FLAGS", (flags,))
    compiled_code.load.cache_clear()
    try:
        there = {dtype: run(dtype) for dtype in TOLERANCES}
    finally:
        compiled_code.load.cache_clear()
    for dtype, tolerance in TOLERANCES.items():
        assert all(error(*pair) < tolerance for pair in zip(there[dtype], here[dtype], strict=True))


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(0, 150), min_size=1, max_size=8).filter(any), seed=st.integers(0, 99))
def test_any_lengths_even_none(lengths, seed):
    query, key, value, _ = heads(lengths, 8, seed=seed)
    out = cpu_attention(query, key, value, offsets(lengths), 0.5)
    assert error(out, reference(query, key, value, [n for n in lengths if n], 0.5)) < 2e-6


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)], ids=str)
def test_scores_that_grow_along_a_sequence_are_shared_as_exactly(dtype, tolerance):
    """Scores reach 300 before the exp, so the inputs' rounding alone causes an error of the size of the tolerances."""
    lengths = [1, 700]
    *inputs, d_out = heads(lengths, 8, dtype)
    inputs[1] *= torch.linspace(0, 90, 701, dtype=dtype)[:, None, None]
    exact, ours = ([x.to(to).requires_grad_() for x in inputs] for to in (torch.float64, dtype))
    expected = reference(*exact, lengths, 1.0)
    out = cpu_attention(*ours, offsets(lengths), 1.0)
    expected.backward(d_out.double())
    out.backward(d_out)
    assert error(out.detach(), expected.detach()) < tolerance / 10
    assert all(error(one.grad, other.grad) < tolerance for one, other in zip(ours, exact, strict=True))


def test_a_nan_stays_in_its_sequence_and_is_not_hidden():
    query, key, value, _ = heads([9, 40], 8)
    query[3, 1, 2] = float("nan")
    key[20, 0, 0] = float("inf")
    out = cpu_attention(query, key, value, offsets([9, 40]), 1.0)
    assert out[3, 1].isnan().all() and out[:3].isfinite().all() and out[4:9].isfinite().all()
    assert not out[9:, 0].isfinite().all() and out[9:, 1:].isfinite().all()


def test_heads_may_lie_in_a_wider_tensor():
    wide = torch.randn(29, 9, 8).split(3, dim=1)
    dense = [heads_THd.clone() for heads_THd in wide]
    assert torch.equal(cpu_attention(*wide, offsets([9, 20]), 0.5), cpu_attention(*dense, offsets([9, 20]), 0.5))


def test_the_number_of_threads_changes_no_bit():
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("wrong", [[0, 5], [0, 12, 9], [1, 9], [0, -3, 9]])
def test_offsets_that_are_none_are_refused_before_any_memory_is_touched(wrong):
    query, key, value, _ = heads([9], 8)
    with pytest.raises(ValueError, match="cu_seqlens"):
        cpu_attention(query, key, value, torch.tensor(wrong, dtype=torch.int32), 1.0)
    with pytest.raises(ValueError, match="rotary tables"):
        cpu_attention(query, key, value, offsets([9]), 1.0, rotary_tables(frequencies(8), 8))


def test_the_kernel_rejects_unsupported_shapes_and_dtypes():
    query = torch.empty(4, 4, 8)
    assert kernel_takes(query, query) and not kernel_takes(query, query[:, :2])
    for other in (query[..., :7], query.half(), query.to("meta")):
        assert not kernel_takes(other, other)
