"""Packed attention on the CPU by a compiled kernel, with its gradient.

In: concatenated queries, keys and values of all sequences, as the projections return them, and optionally rotary
tables. The kernel rotates while it copies a head into cache, which saves passes over memory. One call processes all
sequences and heads of a batch. The kernel is ``cpu.cpp``, compiled per head size.

Shape legend: T tokens in the batch, N sequences, P positions, H heads, d channels of a head.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esmeray.common import compiled_code

_DTYPES = (torch.float32, torch.bfloat16)
_Pointer = ctypes.c_void_p
_DONE, _BAD_SEQUENCES = 1, -1
"""Return codes of the kernel; 0 means out of memory."""


class RotaryTables(NamedTuple):
    """Cosines and sines of the angles, for positions from 0: (P, d/2) fp32, contiguous."""

    cosines: Tensor
    sines: Tensor


def kernel_takes(query: Tensor, key: Tensor) -> bool:
    """Test whether :func:`cpu_attention` supports these inputs and its kernel compiles.

    Supported are fp32 and bf16 on the CPU, with an even head size. ``query``: (T, H, d). ``key``: (T, H_kv, d); grouped
    queries are not supported.
    """
    head = query.shape[-1]
    # The most expensive check last: compiling a new head size takes seconds.
    fits = query.device.type == "cpu" and query.dtype in _DTYPES and query.shape == key.shape
    return fits and head % 2 == 0 and head <= 256 and _compiles(head)


def _kernel(head: int) -> ctypes.CDLL | None:
    """Return the library for heads with this number of channels; compiled once per machine, in seconds."""
    return compiled_code.load(Path(__file__).with_suffix(".cpp"), openmp=True, HEAD=head)


def _compiles(head: int) -> bool:
    return _kernel(head) is not None


# torch.compile can't trace a compiler and a library; the result is constant. This sets the attribute that
# torch.compiler.assume_constant_result of torch 2.13 sets, without its import of torch._dynamo, which takes a second.
_compiles._dynamo_marked_constant = True  # type: ignore[attr-defined]


def cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scaling: float, rotary: RotaryTables | None = None
) -> Tensor:
    """Softmax attention within each sequence.

    Products have the dtype of the inputs, accumulated in fp32; bf16 halves the time on processors with AVX512-BF16.
    Returns (T, H, d), contiguous. ``query``, ``key``, ``value``: (T, H, d) fp32 or bf16. ``cu_seqlens``: (N+1,) int32,
    start of each sequence; the last is T. ``scaling``: factor of the scores. ``rotary``: rotate queries and keys by
    each token's position in its sequence. Raises ValueError (``cu_seqlens`` are not offsets of sequences of T tokens,
    or a sequence is longer than the tables) or MemoryError (no memory for the kernel's buffers, a few kilobytes per
    token of the longest sequence).
    """
    tables = () if rotary is None else tuple(rotary)
    inputs = [_by_token(tensor) for tensor in (query, key, value)]
    # Decided outside: gradients are always off within a custom operator.
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    return torch.ops.esmeray.cpu_attention(*inputs, cu_seqlens, scaling, tables, differentiated)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scaling: float,
    tables: Sequence[Tensor],
    differentiated: bool,
) -> tuple[Tensor, Tensor]:
    """Return (T, H, d) and, if differentiated, (H, T) fp32: the log of each softmax's denominator."""
    out_THd, log_totals_HT = _outputs(query, differentiated)
    _call("forward", [query, key, value], out_THd.data_ptr(), log_totals_HT, cu_seqlens, scaling, tables)
    return out_THd, log_totals_HT


def _attention_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_totals_HT: Tensor,
    cu_seqlens: Tensor,
    scaling: float,
    tables: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    d_query, d_key, d_value = (torch.empty(d_out.shape, dtype=d_out.dtype) for _ in range(3))
    pointers = (_Pointer * 3)(*(gradient.data_ptr() for gradient in (d_query, d_key, d_value)))
    _call("backward", [query, key, value, out, _by_token(d_out)], pointers, log_totals_HT, cu_seqlens, scaling, tables)
    return d_query, d_key, d_value


def _attention_shapes(query, key, value, cu_seqlens, scaling, tables, differentiated):
    return _outputs(query, differentiated)


def _backward_shapes(d_out, query, key, value, out, log_totals_HT, cu_seqlens, scaling, tables):
    return tuple(d_out.new_empty(d_out.shape) for _ in range(3))


def _outputs(query: Tensor, differentiated: bool) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    # An empty tensor if unused, not None: outputs of an operator have one type.
    totals = query.new_empty((heads, tokens) if differentiated else (0, 0), dtype=torch.float32)
    return query.new_empty(query.shape), totals


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, scaling, tables, _ = inputs
    # Saved unrotated: the backward pass rotates again, which saves memory.
    ctx.save_for_backward(query, key, value, *output, cu_seqlens, *tables)
    ctx.scaling = scaling


def _gradients(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, log_totals_HT, cu_seqlens, *tables = ctx.saved_tensors
    gradients = torch.ops.esmeray.cpu_attention_backward(
        d_out, query, key, value, out, log_totals_HT, cu_seqlens, ctx.scaling, tables
    )
    return *gradients, None, None, [None] * len(tables), None


# Registered as operators, since a call of ctypes would break torch.compile's graph of a layer. Defined by hand, since
# torch.library.custom_op of torch 2.13 imports torch._dynamo at its first call, which takes more than a second.
_LIBRARY = torch.library.Library("esmeray", "FRAGMENT")
_LIBRARY.define(
    "cpu_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, float scaling, Tensor[] tables, "
    "bool differentiated) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.define(
    "cpu_attention_backward(Tensor d_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor log_totals, "
    "Tensor cu_seqlens, float scaling, Tensor[] tables) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("cpu_attention", _attention, "CPU")
_LIBRARY.impl("cpu_attention_backward", _attention_backward, "CPU")
# Shapes only, for tracing by torch.compile.
torch.library.register_fake("esmeray::cpu_attention", _attention_shapes, lib=_LIBRARY)
torch.library.register_fake("esmeray::cpu_attention_backward", _backward_shapes, lib=_LIBRARY)
torch.library.register_autograd("esmeray::cpu_attention", _gradients, setup_context=_keep, lib=_LIBRARY)


def _by_token(tensor_THd: Tensor) -> Tensor:
    """Return the tensor with the heads of a token contiguous; tokens may have any stride."""
    _, heads, head = tensor_THd.shape
    dense = tensor_THd.stride(2) == 1 and (tensor_THd.stride(1) == head or heads == 1)
    return tensor_THd if dense else tensor_THd.contiguous()


def _call(
    name: str,
    inputs: list[Tensor],
    outputs: Any,
    log_totals_HT: Tensor,
    cu_seqlens: Tensor,
    scaling: float,
    tables: Sequence[Tensor],
) -> None:
    num_tokens, heads, head = inputs[0].shape
    kernels = _kernel(head)
    assert kernels is not None  # checked by kernel_takes
    # The kernel takes raw pointers: offsets beyond the tokens would access foreign memory.
    if cu_seqlens.dtype != torch.int32 or int(cu_seqlens[-1]) != num_tokens:
        raise ValueError(f"cu_seqlens must be int32 and end at the number of tokens, {num_tokens}")
    cu_seqlens = cu_seqlens.contiguous()  # kept in a variable until the kernel has read it
    result = getattr(kernels, f"esmeray_attention_{name}")(
        ctypes.c_int(inputs[0].dtype == torch.bfloat16),
        (_Pointer * len(inputs))(*(tensor.data_ptr() for tensor in inputs)),
        (ctypes.c_int64 * len(inputs))(*(tensor.stride(0) for tensor in inputs)),
        outputs if name == "backward" else _Pointer(outputs),
        _Pointer(log_totals_HT.data_ptr()) if log_totals_HT.numel() else None,
        _Pointer(cu_seqlens.data_ptr()),
        ctypes.c_int64(cu_seqlens.numel() - 1),
        ctypes.c_int64(num_tokens),
        ctypes.c_int64(heads),
        *([_Pointer(table.data_ptr()) for table in tables] or [_Pointer(), _Pointer()]),  # null: no rotation
        ctypes.c_int64(tables[0].shape[0] if tables else 0),
        ctypes.c_float(scaling),
        ctypes.c_int(torch.get_num_threads()),
    )
    if result == _BAD_SEQUENCES:
        raise ValueError("cu_seqlens must increase from 0, and no sequence may be longer than the rotary tables")
    if result != _DONE:
        raise MemoryError("out of memory in attention: lower the token budget or the sequence length")
