"""The one data structure that runs from disk to loss: sequences end to end, nothing padded.

Shape legend: T tokens in the batch (special tokens included), M tokens with a target, N sequences, C columns of labels.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED_TARGET = -100
"""Target of a token that no loss looks at (PyTorch's ``ignore_index`` default)."""

NO_LABEL = -1
"""Label of a sequence that is conditioned on no class."""


class BatchShape(NamedTuple):
    """T, N and the longest sequence that batches are filled to; see :meth:`PackedBatch.filled`."""

    num_tokens: int
    num_sequences: int
    max_seqlen: int


@dataclass(frozen=True)
class PackedBatch:
    """Sequences of different lengths, concatenated.

    Attributes:
        tokens: (T,) int64, token ids, special tokens included.
        cu_seqlens: (N+1,) int32, where each sequence starts; ``cu_seqlens[-1] == T``.
        max_seqlen: length in tokens of the longest sequence.
        positions: (T,) int64, position of each token in its own sequence, from 0.
        records: (N,) int64, index of each sequence in its store.
        targets: what is to be predicted, or None. Token ids or classes of residues are (T,) int64; a class of each
            sequence is (N,) int64; labels that are yes or no, and numbers, are (N, C) float32. No loss is taken where
            an int64 target is :data:`IGNORED_TARGET`, nor at a float target that is NaN.
        weights: (N,) float32, how much each sequence counts in the loss; None counts all alike.
        features: what a frozen backbone made of the sequences before, in place of running it: (T, D) float32, or (N, D)
            pooled in a batch :meth:`without_tokens`. None where the backbone is to run.
        target_positions: (M,) int64, the tokens with a target, ascending; None where they are to be looked for. Found
            while the batch is on the CPU, since looking for them on CUDA waits for the device.
        coordinates: (T, 4, 3) float32, N, CA, C and O of each residue in Å; NaN where they are not known, and for
            special tokens. None in batches without structures.
        chains: (T,) int64, the chain of a structure that each token belongs to.
        labels: (N,) int64, the class that a sequence is conditioned on; -1 for none.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    positions: Tensor
    records: Tensor
    targets: Tensor | None = None
    weights: Tensor | None = None
    features: Tensor | None = None
    target_positions: Tensor | None = None
    coordinates: Tensor | None = None
    chains: Tensor | None = None
    labels: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.numel()

    @property
    def num_sequences(self) -> int:
        """N."""
        return self.cu_seqlens.numel() - 1

    def segment_ids(self) -> Tensor:
        """(T,) int64: the index in 0..N-1 of the sequence that each token belongs to."""
        lengths_N = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()
        return torch.repeat_interleave(
            torch.arange(self.num_sequences, device=lengths_N.device), lengths_N, output_size=self.num_tokens
        )

    def without_tokens(self) -> PackedBatch:
        """The same sequences with no tokens: T is 0, and what is known of each stands in ``features``."""
        return replace(
            self,
            tokens=self.tokens[:0],
            positions=self.positions[:0],
            cu_seqlens=torch.zeros_like(self.cu_seqlens),
            max_seqlen=0,
        )

    def pieces(self, count: int) -> list[PackedBatch]:
        """The batch in at most ``count`` parts of whole sequences and about equally many tokens, in order."""
        N, T = self.num_sequences, self.num_tokens
        count = min(count, N)
        if count <= 1:
            return [self]
        starts = self.cu_seqlens.tolist()
        # Without tokens every sequence counts alike.
        sizes_N = [end - start for start, end in pairwise(starts)] if T else [1] * N
        bounds = _even_bounds(sizes_N, count)
        return [self._part(start, end, starts) for start, end in pairwise(bounds)]

    def without_targets(self) -> PackedBatch:
        """The first sequence alone, with nothing that counts: it adds nothing to loss, metrics or counts."""
        first = self._part(0, 1, self.cu_seqlens.tolist())
        targets = first.targets
        if targets is not None:
            targets = torch.full_like(targets, torch.nan if targets.is_floating_point() else IGNORED_TARGET)
        weights = None if first.weights is None else torch.zeros_like(first.weights)
        return replace(first, targets=targets, weights=weights, records=first.records[:0])

    def filled(self, shape: BatchShape) -> PackedBatch:
        """The same sequences, then fillers: where every batch has the same shape, one compiled graph takes all.

        Fillers are sequences of token 0, at most ``max_seqlen`` long, then empty ones. They have no target, no weight
        and no record. ``target_positions`` and ``records`` stay as they are. Raises ValueError where the batch is
        larger than the shape, or has a single token in every sequence.
        """
        T, N = self.num_tokens, self.num_sequences
        fillers = [*range(T + shape.max_seqlen, shape.num_tokens, shape.max_seqlen)]
        fillers += [shape.num_tokens] * (shape.num_sequences - N - len(fillers))
        ends = [*self.cu_seqlens.tolist(), *fillers]
        fits = T <= shape.num_tokens == ends[-1] and N <= shape.num_sequences == len(ends) - 1
        if T == N or not fits or self.max_seqlen > shape.max_seqlen:
            raise ValueError(f"a batch of {T} tokens in {N} sequences can't be filled to {shape}")

        def filled(tensor: Tensor | None, value: float = 0) -> Tensor | None:
            """With more rows, for tokens or for sequences."""
            if tensor is None:
                return None
            rows = shape.num_tokens - T if tensor.shape[0] == T else shape.num_sequences - N
            return torch.cat([tensor, tensor.new_full((rows, *tensor.shape[1:]), value)])

        nothing = torch.nan if self.targets is not None and self.targets.is_floating_point() else IGNORED_TARGET
        positions = torch.arange(shape.num_tokens - T) % shape.max_seqlen
        return replace(
            self,
            tokens=torch.cat([self.tokens, self.tokens.new_zeros(shape.num_tokens - T)]),
            cu_seqlens=torch.tensor(ends, dtype=self.cu_seqlens.dtype),
            max_seqlen=shape.max_seqlen,
            positions=torch.cat([self.positions, positions]),
            targets=filled(self.targets, nothing),
            weights=filled(self.weights),
            features=filled(self.features),
            coordinates=filled(self.coordinates, torch.nan),
            chains=filled(self.chains),
            labels=filled(self.labels, NO_LABEL),
        )

    def _part(self, start: int, end: int, starts: list[int]) -> PackedBatch:
        """Sequences ``start`` to ``end``; their target positions are not known."""
        N, T = self.num_sequences, self.num_tokens
        by_sequence, by_token = slice(start, end), slice(starts[start], starts[end])

        def cut(tensor: Tensor | None) -> Tensor | None:
            """Rows of tokens or of sequences: where T is N, every sequence is a token and both are the same."""
            return None if tensor is None else tensor[by_token if tensor.shape[0] == T != N else by_sequence]

        lengths = [after - before for before, after in pairwise(starts[start : end + 1])]
        return PackedBatch(
            tokens=self.tokens[by_token],
            cu_seqlens=self.cu_seqlens[start : end + 1] - starts[start],
            max_seqlen=max(lengths),
            positions=self.positions[by_token],
            records=self.records[by_sequence],
            targets=cut(self.targets),
            weights=None if self.weights is None else self.weights[by_sequence],
            features=cut(self.features),
            coordinates=None if self.coordinates is None else self.coordinates[by_token],
            chains=None if self.chains is None else self.chains[by_token],
            labels=None if self.labels is None else self.labels[by_sequence],
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """The same batch with every tensor on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def keep_for(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of what another stream made from being used again before this one is through with it."""
        for field in fields(self):
            if isinstance(tensor := getattr(self, field.name), Tensor):
                tensor.record_stream(stream)

    def pin_memory(self) -> PackedBatch:
        """The same batch in page-locked memory (what :class:`torch.utils.data.DataLoader` calls)."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function) -> PackedBatch:
        moved = {
            field.name: function(getattr(self, field.name))
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


def _even_bounds(sizes: list[int], count: int) -> list[int]:
    """Bounds that cut a row of sizes into ``count`` parts of at least one, each cut at the nearest to its share."""
    total, sums = sum(sizes), [0, *accumulate(sizes)]
    bounds = [0]
    for part in range(1, count):
        share = total * part / count
        after = bisect_left(sums, share)
        nearest = after - 1 if after and share - sums[after - 1] < sums[after] - share else after
        bounds.append(min(max(nearest, bounds[-1] + 1), len(sizes) - count + part))
    return [*bounds, len(sizes)]


def has_target(targets: Tensor) -> Tensor:
    """(T,) or (N,) bool: the tokens or sequences that a loss is taken of; loss sums are divided by their count.

    ``targets`` as in :class:`PackedBatch`. A row of floats has a target where one of its columns, or more, is not NaN.
    """
    return ~targets.isnan().all(-1) if targets.is_floating_point() else targets != IGNORED_TARGET
