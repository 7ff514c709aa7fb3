"""Attention over packed sequences: the fastest implementation for the device and dtype, and its name in transformers.

In: concatenated queries, keys and values of all sequences of a batch, and the start of each. Out: attention within each
sequence. On CUDA in half precision this is FlashAttention's varlen kernel, on the CPU the kernel of
:mod:`esmeray.model.attention.cpu`. In other cases (fp32 on CUDA, dropout, grouped queries on the CPU) SDPA is called
once per sequence.

Registered as ``esmeray_packed`` (:mod:`esmeray.model.backbones.huggingface`), it makes any transformer that uses the
AttentionInterface padding-free, given ``cu_seqlens`` in its forward. No mask function is registered: transformers would
look for packed sequences itself, which synchronises with a CUDA device.

Shape legend: T tokens in the batch, N sequences, H heads, d channels of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from esmeray.model.attention.cpu import cpu_attention, kernel_takes

PACKED_ATTENTION = "esmeray_packed"
"""Name of the attention implementation, for a transformers config's ``_attn_implementation``."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scaling: float,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Return (T, H, d): attention within each packed sequence.

    ``query``: (T, H, d). ``key``, ``value``: (T, H_kv, d); H_kv divides H (grouped queries). ``cu_seqlens``: (N+1,)
    int32, start of each sequence. ``scaling``: factor of the scores. ``dropout``: probability of dropping a score.
    """
    if _flash_takes(query, dropout):
        # Imported here: it imports torch._dynamo, which takes a second and is not needed on a CPU.
        from torch.nn.attention.varlen import varlen_attn

        # Passed only if needed: torch 2.11 lacks the argument.
        grouped: Any = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
        out_THd = varlen_attn(  # one kernel for all sequences, without synchronisation
            query,
            key,
            value,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            scale=scaling,
            window_size=(-1, 0) if causal else (-1, -1),
            **grouped,
        )
        assert isinstance(out_THd, Tensor)
        return out_THd
    # The CPU kernel supports neither a causal mask nor dropout.
    if not causal and dropout == 0.0 and kernel_takes(query, key):
        return cpu_attention(query, key, value, cu_seqlens, scaling)
    return _sdpa_segments(query, key, value, cu_seqlens, scaling, causal, dropout)


def packed_attention(  # noqa: PLR0913 - the parameters of AttentionInterface
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention within each packed sequence, with the signature of transformers' AttentionInterface.

    Returns (1, T, H, d), and None for the attention weights, which are never materialised. Raises ValueError for
    unsupported arguments: padding masks, windows, soft caps, biases, batches.

    ``query``: (1, H, T, d). ``key``, ``value``: (1, H_kv, T, d); H_kv divides H. ``scaling`` defaults to d**-0.5,
    ``is_causal`` to the module's; a window must not be shorter than the longest sequence.
    """
    # Refused, not ignored: transformers passes whatever a config sets, and ignoring it gives wrong features silently.
    if cu_seqlens is None or max_seqlen is None:
        raise ValueError(f"{PACKED_ATTENTION} needs cu_seqlens and max_seqlen as arguments of the model's forward")
    if attention_mask is not None or query.shape[0] != 1:
        raise ValueError(f"{PACKED_ATTENTION} needs a single row of packed sequences without an attention mask")
    if softcap is not None or position_bias is not None or (sliding_window or max_seqlen) < max_seqlen:
        raise ValueError(f"{PACKED_ATTENTION} does not support sliding windows, or soft-capped or biased scores")
    causal = bool(getattr(module, "is_causal", False)) if is_causal is None else is_causal
    query_THd, key_THd, value_THd = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out_THd = attend(
        query_THd,
        key_THd,
        value_THd,
        cu_seqlens,
        max_seqlen,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=causal,
        dropout=dropout,
    )
    return out_THd.unsqueeze(0), None


def _flash_takes(query: Tensor, dropout: float) -> bool:
    """Test whether ``varlen_attn`` (FlashAttention) supports this.

    It needs half precision, 8 to 256 channels per head, and no dropout.
    """
    head = query.shape[-1]
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_half and dropout == 0.0 and head <= 256 and head % 8 == 0


# Lengths are read on the host, and a graph would be traced for each set of lengths. torch.compiler.disable does the
# same, but imports torch._dynamo immediately, which takes a second.
@torch._disable_dynamo
def _sdpa_segments(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scaling: float, causal: bool, dropout: float
) -> Tensor:
    """Attention with one SDPA call per sequence. On CUDA (fp32 or dropout) it waits for ``cu_seqlens``."""
    lengths = cu_seqlens.diff().tolist()  # CPU-GPU sync point
    segments = zip(*(tensor.transpose(0, 1).split(lengths, dim=1) for tensor in (query, key, value)), strict=True)
    grouped = query.shape[1] != key.shape[1]
    outputs = [
        functional.scaled_dot_product_attention(
            q[None], k[None], v[None], dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=grouped
        )[0]
        for q, k, v in segments
    ]
    return torch.cat(outputs, dim=1).transpose(0, 1)
