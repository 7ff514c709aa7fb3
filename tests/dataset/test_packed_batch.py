"""Batches in parts: put together they are the batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataset.packed_batch import IGNORED_TARGET, PackedBatch

LAYOUTS = ["tokens", "classes", "columns", "weighted", "token features", "pooled features", "none"]


def batch_of(lengths: list[int], layout: str) -> PackedBatch:
    """Sequences of these lengths, every value its own."""
    T, N = sum(lengths), len(lengths)
    targets = {"tokens": torch.arange(T) + 500, "columns": torch.arange(2.0 * N).reshape(N, 2), "none": None}
    features = {"token features": torch.rand(T, 3), "pooled features": torch.rand(N, 3)}
    batch = PackedBatch(
        tokens=torch.arange(T) + 1000,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_seqlen=max(lengths),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        records=torch.arange(N) + 7,
        targets=targets.get(layout, torch.arange(N)),
        weights=torch.rand(N) if layout == "weighted" else None,
        features=features.get(layout),
    )
    return batch.without_tokens() if layout == "pooled features" else batch


def joined(parts: list[PackedBatch], name: str) -> torch.Tensor | None:
    values = [getattr(part, name) for part in parts]
    return None if values[0] is None else torch.cat(values)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from(LAYOUTS), st.sampled_from([1, 2, 3, 4, 8])
)
def test_parts_put_together_are_the_batch(lengths, layout, count):
    batch = batch_of(lengths, layout)
    parts = batch.pieces(count)
    assert len(parts) == min(count, len(lengths))
    for name in ("tokens", "positions", "records", "targets", "weights", "features"):
        whole, together = getattr(batch, name), joined(parts, name)
        assert (whole is None and together is None) or torch.equal(whole, together)
    sizes = [part.cu_seqlens.diff() for part in parts]
    if len(parts) == 2:
        assert abs(parts[0].num_tokens - parts[1].num_tokens) <= max(lengths) or not batch.num_tokens
    assert torch.equal(torch.cat(sizes), batch.cu_seqlens.diff())
    for part, size_N in zip(parts, sizes, strict=True):
        assert part.cu_seqlens.dtype == torch.int32
        assert part.cu_seqlens[0] == 0
        assert part.cu_seqlens[-1] == part.num_tokens
        assert part.max_seqlen == int(size_N.max())
        assert part.num_sequences >= 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_part_without_targets_counts_for_nothing(layout):
    part = batch_of([4, 5], layout).without_targets()
    assert part.num_sequences == 1
    assert part.records.numel() == 0
    if part.targets is not None and part.targets.is_floating_point():
        assert part.targets.isnan().all()
    elif part.targets is not None:
        assert (part.targets == IGNORED_TARGET).all()
    assert part.weights is None or part.weights.sum() == 0
