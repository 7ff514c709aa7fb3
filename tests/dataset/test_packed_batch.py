"""Batches in parts: put together they are the batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataset.packed_batch import IGNORED_TARGET, BatchShape, PackedBatch, has_target

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


@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=8),
    st.sampled_from([layout for layout in LAYOUTS if layout != "pooled features"]),
    st.integers(0, 200),
)
def test_filled_batch_is_the_batch_and_then_what_counts_for_nothing(lengths, layout, more):
    batch = batch_of(lengths, layout)
    T, N = batch.num_tokens, batch.num_sequences
    shape = BatchShape(T + more, N + 101, 40)
    filled = batch.filled(shape)
    assert (filled.num_tokens, filled.num_sequences, filled.max_seqlen) == shape
    sizes = filled.cu_seqlens.diff().tolist()
    assert sizes[:N] == lengths and sum(sizes) == T + more and max(sizes) <= 40 and min(sizes) >= 0
    assert torch.equal(filled.positions, torch.cat([torch.arange(size) for size in sizes]))
    assert torch.equal(filled.tokens[:T], batch.tokens) and torch.equal(filled.records, batch.records)
    for name in ("targets", "weights", "features"):
        before, after = getattr(batch, name), getattr(filled, name)
        if before is not None:
            assert torch.equal(after[: len(before)], before)
            assert len(after) == (T + more if len(before) == T else N + 101)
            assert not (has_target(after[len(before) :]) if name == "targets" else after[len(before) :]).any()


@pytest.mark.parametrize("shape", [(8, 9, 9), (30, 3, 9), (30, 2, 9), (30, 9, 4)])
def test_batch_that_a_shape_does_not_hold_is_refused(shape):
    with pytest.raises(ValueError, match="a batch of 9 tokens in 2 sequences can't be filled"):
        batch_of([4, 5], "tokens").filled(BatchShape(*shape))
