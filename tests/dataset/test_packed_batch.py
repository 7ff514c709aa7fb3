"""Parts of a split batch add up to the batch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esmeray.dataset.packed_batch import FEATURES, TARGETS, WEIGHTS, BatchShape, PackedBatch
from esmeray.dataset.targets import has_target

LAYOUTS = ["tokens", "classes", "columns", "pooled features"]


def batch_of(lengths: list[int], layout: str) -> PackedBatch:
    """A batch of these lengths with unique values and, by ``layout``, targets per token or sequence, or features."""
    T, N = sum(lengths), len(lengths)
    by_token = {FEATURES: torch.rand(T, 3)}
    by_sequence = {WEIGHTS: torch.rand(N)}
    if layout == "tokens":
        by_token[TARGETS] = torch.arange(T) + 500
    elif layout != "pooled features":
        by_sequence[TARGETS] = torch.arange(N) if layout == "classes" else torch.arange(2.0 * N).reshape(N, 2)
    batch = PackedBatch(
        tokens=torch.arange(T) + 1000,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_seqlen=max(lengths),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        records=torch.arange(N) + 7,
        by_token=by_token,
        by_sequence=by_sequence,
    )
    if layout != "pooled features":
        return batch
    none = torch.zeros(N + 1, dtype=torch.int32)
    tokens = {"tokens": batch.tokens[:0], "positions": batch.positions[:0], "cu_seqlens": none, "max_seqlen": 0}
    return replace(batch, **tokens, by_token={}, by_sequence={FEATURES: torch.rand(N, 3)})


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from(LAYOUTS), st.sampled_from([1, 2, 3, 4, 8])
)
def test_parts_put_together_are_the_batch(lengths, layout, count):
    batch = batch_of(lengths, layout)
    parts = batch.pieces(count)
    assert len(parts) == min(count, len(lengths))
    for name in ("tokens", "positions", "records"):
        assert torch.equal(getattr(batch, name), torch.cat([getattr(part, name) for part in parts]))
    for name, rows in (batch.by_token | batch.by_sequence).items():
        assert torch.equal(rows, torch.cat([part.named(name) for part in parts]))
    sizes = [part.cu_seqlens.diff() for part in parts]
    if len(parts) == 2:
        assert abs(parts[0].num_tokens - parts[1].num_tokens) <= max(lengths) or not batch.num_tokens
    assert torch.equal(torch.cat(sizes), batch.cu_seqlens.diff())
    for part, size_N in zip(parts, sizes, strict=True):
        assert part.cu_seqlens.dtype == torch.int32
        assert (part.cu_seqlens[0], part.cu_seqlens[-1]) == (0, part.num_tokens)
        assert part.max_seqlen == int(size_N.max())


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
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
    for before, after, rows in (
        (batch.by_token, filled.by_token, T + more),
        (batch.by_sequence, filled.by_sequence, N + 101),
    ):
        for name, tensor in before.items():
            fillers = after[name][len(tensor) :]
            assert torch.equal(after[name][: len(tensor)], tensor) and len(after[name]) == rows
            assert not (has_target(fillers) if name == TARGETS else fillers).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_filler_has_the_form_of_the_batch_and_nothing_that_counts(layout):
    batch = batch_of([3, 5], layout)
    filler = batch.without_targets()
    assert (filler.num_sequences, filler.records.numel()) == (1, 0)
    for before, after in ((batch.by_token, filler.by_token), (batch.by_sequence, filler.by_sequence)):
        assert {name: rows.dtype for name, rows in before.items()} == {name: rows.dtype for name, rows in after.items()}
        assert all(rows.shape[1:] == after[name].shape[1:] for name, rows in before.items())
    targets = filler.named(TARGETS)
    assert targets is None or not has_target(targets).any()
    assert not filler.by_sequence.get(WEIGHTS, torch.zeros(1)).any()


@pytest.mark.parametrize("shape", [(8, 9, 9), (30, 3, 9), (30, 2, 9), (30, 9, 4)])
def test_batch_that_a_shape_does_not_hold_is_refused(shape):
    with pytest.raises(ValueError, match="a batch of 9 tokens in 2 sequences can't be padded"):
        batch_of([4, 5], "tokens").filled(BatchShape(*shape))
