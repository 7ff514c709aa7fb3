"""Packed attention on the CPU by a compiled kernel, with its gradient.

In: queries, keys and values of all sequences end to end, as the projections give them, and optionally the rotary
tables: the kernel rotates while it copies a head into its cache, which saves the passes over memory. One call does all
sequences and heads of a batch. The kernel is ``cpu.cpp``, compiled for each head size.

Shape legend: T tokens in the batch, N sequences, H heads, d channels of a head.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import compiled_code
from model.attention.rotary import RotaryTables

_DTYPES = (torch.float32, torch.bfloat16)
_LARGEST_HEAD = 256
_Pointer = ctypes.c_void_p
_DONE, _BAD_SEQUENCES = 1, -1
"""The kernel's result; 0 where it is out of memory."""


def kernel_takes(query: Tensor, key: Tensor) -> bool:
    """Test that :func:`cpu_attention` can be used: on the CPU, in fp32 or bf16, even heads, and the kernel compiles.

    ``query``: (T, H, d). ``key``: (T, H_kv, d); grouped queries are left to others.
    """
    head = query.shape[-1]
    fits = query.device.type == "cpu" and query.dtype in _DTYPES and query.shape == key.shape
    return fits and head % 2 == 0 and head <= _LARGEST_HEAD and _compiles(head)


def _kernel(head: int) -> ctypes.CDLL | None:
    """The library for heads of this many channels; compiling it takes seconds, once a machine."""
    return compiled_code.load(Path(__file__).with_suffix(".cpp"), openmp=True, HEAD=head)


@torch.compiler.disable
def _compiles(head: int) -> bool:
    return _kernel(head) is not None


@torch.compiler.disable
def cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scaling: float, rotary: RotaryTables | None = None
) -> Tensor:
    """Softmax attention within each sequence.

    Products are of the dtype given, summed in fp32; bf16 halves the time where the processor has AVX512-BF16. Returns
    (T, H, d), contiguous. ``query``, ``key``, ``value``: (T, H, d) fp32 or bf16. ``cu_seqlens``: (N+1,) int32, where
    each sequence starts; the last is T. ``scaling``: factor of the scores. ``rotary``: rotate queries and keys by each
    token's position in its sequence. Raises ValueError (``cu_seqlens`` are not offsets of sequences of T tokens, or the
    tables end before a sequence does) or MemoryError (the kernel's own buffers, a few kilobytes a token of the longest
    sequence, could not be had).
    """
    return _CpuAttention.apply(query, key, value, cu_seqlens, scaling, rotary)  # type: ignore[no-any-return]


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        scaling: float,
        rotary: RotaryTables | None,
    ) -> Tensor:
        inputs = [_by_token(tensor) for tensor in (query, key, value)]
        out_THd = torch.empty(query.shape, dtype=query.dtype)
        differentiated = any(ctx.needs_input_grad[:3])
        log_totals_HT = torch.empty(query.shape[1], query.shape[0]) if differentiated else None
        _call("forward", inputs, out_THd.data_ptr(), log_totals_HT, cu_seqlens, scaling, rotary)
        if differentiated:
            ctx.save_for_backward(*inputs, out_THd, log_totals_HT)
            ctx.arguments = cu_seqlens, scaling, rotary
        return out_THd

    @staticmethod
    def backward(ctx: Any, d_out_THd: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *inputs, log_totals_HT = ctx.saved_tensors
        gradients = [torch.empty(d_out_THd.shape, dtype=d_out_THd.dtype) for _ in range(3)]
        pointers = (_Pointer * 3)(*(gradient.data_ptr() for gradient in gradients))
        _call("backward", [*inputs, _by_token(d_out_THd)], pointers, log_totals_HT, *ctx.arguments)
        return *gradients, None, None, None


def _by_token(tensor_THd: Tensor) -> Tensor:
    """The same, with the heads of a token side by side; tokens may be any distance apart."""
    _, heads, head = tensor_THd.shape
    dense = tensor_THd.stride(2) == 1 and (tensor_THd.stride(1) == head or heads == 1)
    return tensor_THd if dense else tensor_THd.contiguous()


def _call(
    name: str,
    inputs: list[Tensor],
    outputs: Any,
    log_totals_HT: Tensor | None,
    cu_seqlens: Tensor,
    scaling: float,
    rotary: RotaryTables | None,
) -> None:
    num_tokens, heads, head = inputs[0].shape
    kernels = _kernel(head)
    assert kernels is not None  # kernel_takes was asked before
    if cu_seqlens.dtype != torch.int32 or int(cu_seqlens[-1]) != num_tokens:
        raise ValueError(f"cu_seqlens must be int32 and end at {num_tokens}, the number of tokens")
    result = getattr(kernels, f"esmeray_attention_{name}")(
        ctypes.c_int(inputs[0].dtype == torch.bfloat16),
        (_Pointer * len(inputs))(*(tensor.data_ptr() for tensor in inputs)),
        (ctypes.c_int64 * len(inputs))(*(tensor.stride(0) for tensor in inputs)),
        outputs if name == "backward" else _Pointer(outputs),
        None if log_totals_HT is None else _Pointer(log_totals_HT.data_ptr()),
        _Pointer(cu_seqlens.contiguous().data_ptr()),
        ctypes.c_int64(cu_seqlens.numel() - 1),
        ctypes.c_int64(num_tokens),
        ctypes.c_int64(heads),
        None if rotary is None else _Pointer(rotary.cosines.data_ptr()),
        None if rotary is None else _Pointer(rotary.sines.data_ptr()),
        ctypes.c_int64(0 if rotary is None else rotary.cosines.shape[0]),
        ctypes.c_float(scaling),
        ctypes.c_int(torch.get_num_threads()),
    )
    if result == _BAD_SEQUENCES:
        raise ValueError("cu_seqlens must ascend from 0, with no sequence longer than the rotary tables")
    if result != _DONE:
        raise MemoryError("no memory was left for attention: lower the token budget or the length of sequences")
