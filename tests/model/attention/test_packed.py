"""Packed attention refuses unsupported arguments. test_huggingface.py checks that it is attention per sequence."""

import pytest
import torch
from torch import nn

from esmeray.model.attention.packed import packed_attention
from tests.model.support import no_waiting


def attend(q, k, v, cu_seqlens, **kwargs):
    return packed_attention(nn.Identity(), q, k, v, None, cu_seqlens=cu_seqlens, max_seqlen=64, **kwargs)[0]


def test_dropout_drops_attention_scores():
    q = torch.randn(1, 2, 9, 8)
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    assert not torch.equal(attend(q, q, q, cu_seqlens, dropout=0.5), attend(q, q, q, cu_seqlens))
    for kwargs in ({"sliding_window": 4}, {"softcap": 30.0}):
        with pytest.raises(ValueError, match="does not support"):
            attend(q, q, q, cu_seqlens, **kwargs)
    with pytest.raises(ValueError, match="cu_seqlens"):
        packed_attention(nn.Identity(), q, q, q, None)
    with pytest.raises(ValueError, match="without an attention mask"):
        packed_attention(nn.Identity(), q, q, q, torch.ones(9), cu_seqlens=cu_seqlens, max_seqlen=5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_flash_kernel_is_asked_for_the_same_attention(monkeypatch, causal):
    """The kernel needs a GPU; here its arguments are checked for their documented meaning."""

    def documented(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
        assert cu_seq_q is cu_seq_k and (max_q, max_k) == (64, 64)
        rows = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        kwargs = {"scaling": scale, "is_causal": window_size == (-1, 0)}
        assert enable_gqa == (query.shape[1] != key.shape[1])
        return attend(*rows, cu_seq_q, **kwargs)[0]

    q = torch.randn(1, 4, 9, 8)
    k, v = (torch.randn(1, 2, 9, 8) for _ in range(2))
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    expected = attend(q, k, v, cu_seqlens, scaling=0.5, is_causal=causal)
    with monkeypatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", documented)
        takes = iter([True, False])  # the packed call, then the call in the substitute
        patch.setattr("esmeray.model.attention.packed._flash_takes", lambda *_: next(takes))
        assert torch.equal(attend(q, k, v, cu_seqlens, scaling=0.5, is_causal=causal), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [False, True])
def test_the_flash_kernel_agrees_with_sdpa_without_synchronising(causal):
    q, k, v = (torch.randn(1, 4, 99, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cu_seqlens = torch.tensor([0, 40, 41, 99], dtype=torch.int32, device="cuda")
    with no_waiting():
        flash = attend(q, k, v, cu_seqlens, is_causal=causal)
        flash.float().sum().backward()
    exact = attend(q.float(), k.float(), v.float(), cu_seqlens, is_causal=causal)
    torch.testing.assert_close(flash.float(), exact, atol=2e-2, rtol=2e-2)
