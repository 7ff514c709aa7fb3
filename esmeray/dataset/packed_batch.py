"""The one data structure that runs from disk to loss: sequences end to end, nothing padded.

Shape legend: T tokens in the batch (special tokens included), M tokens with a target, N sequences, C columns of labels.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esmeray.dataset.targets import IGNORED_TARGET

NO_LABEL = -1
"""Label of a sequence that is conditioned on no class."""

TARGETS = "targets"
"""Values to predict. By token: (T,) int64 ids or classes of residues; by sequence: (N,) int64 classes, or (N, C)
float32 of yes, no and numbers. No loss is taken at :data:`IGNORED_TARGET`, nor at NaN."""
WEIGHTS = "weights"
"""By sequence, (N,) float32: how much each counts in the loss; without them all count alike."""
FEATURES = "features"
"""Outputs of a frozen backbone, instead of running it: by token (T, D) float32, or by sequence (N, D), pooled."""
COORDINATES = "coordinates"
"""By token, (T, 4, 3) float32: N, CA, C and O of each residue in Å; NaN where unknown and for special tokens."""
CHAINS = "chains"
"""By token, (T,) int64: the chain of a structure that each belongs to."""
LABELS = "labels"
"""By sequence, (N,) int64: the class that each is conditioned on, or :data:`NO_LABEL`."""


_FILLERS: dict[str, tuple[int, float]] = {
    TARGETS: (IGNORED_TARGET, torch.nan),
    COORDINATES: (0, torch.nan),
    LABELS: (NO_LABEL, 0.0),
}
"""The value of a row that counts for nothing, as an integer and as a float, of names for which 0 means something."""


def filler_value(name: str, dtype: torch.dtype) -> float:
    """The value of a named tensor in rows that count for nothing."""
    integer, number = _FILLERS.get(name, (0, 0.0))
    return number if dtype.is_floating_point else integer


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
        by_token: what a task adds for each token, (T, ...), by a name of this module.
        by_sequence: what a task adds for each sequence, (N, ...), by a name of this module.
        target_positions: (M,) int64, the tokens with a target, ascending; None where they are to be looked for, which
            on CUDA waits for the device.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    positions: Tensor
    records: Tensor
    by_token: Mapping[str, Tensor] = field(default_factory=dict)
    by_sequence: Mapping[str, Tensor] = field(default_factory=dict)
    target_positions: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    def segment_ids(self) -> Tensor:
        """(T,) int64: the index in 0..N-1 of the sequence that each token belongs to."""
        lengths_N = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()
        # With the size of its output, which it would else ask the device for, and wait.
        return torch.repeat_interleave(
            torch.arange(self.num_sequences, device=lengths_N.device), lengths_N, output_size=self.num_tokens
        )

    @property
    def targets(self) -> Tensor:
        """Targets by token or by sequence; ValueError where the batch has none."""
        targets = self.named(TARGETS)
        if targets is None:
            raise ValueError("this task needs a batch with targets")
        return targets

    def find_targets(self) -> Tensor:
        """(M,) int64: where the tokens with a target are; see :attr:`target_positions`."""
        known = self.target_positions
        return (self.targets != IGNORED_TARGET).nonzero().squeeze(-1) if known is None else known

    def named(self, name: str) -> Tensor | None:
        """The tensor of this name, by token or by sequence; None where the batch has none."""
        return self.by_token.get(name, self.by_sequence.get(name))

    def adding(
        self, by_token: Mapping[str, Tensor] | None = None, by_sequence: Mapping[str, Tensor] | None = None
    ) -> "PackedBatch":
        """The same batch with more named tensors, or with others of these names."""
        return replace(
            self,
            by_token={**self.by_token, **(by_token or {})},
            by_sequence={**self.by_sequence, **(by_sequence or {})},
        )

    def pieces(self, count: int) -> list["PackedBatch"]:
        """The batch in at most ``count`` parts of whole sequences and about equally many tokens, in order."""
        count = min(count, self.num_sequences)
        if count <= 1:
            return [self]
        starts = self.cu_seqlens.tolist()
        sizes_N = [end - start for start, end in pairwise(starts)]
        if not self.num_tokens:
            sizes_N = [1] * self.num_sequences  # pooled features: every sequence counts alike
        return [self._slice(start, end, starts) for start, end in pairwise(_even_bounds(sizes_N, count))]

    def without_targets(self) -> "PackedBatch":
        """The first sequence alone, with nothing that counts: it adds nothing to loss, metrics or counts."""
        # One of its own, since models take no batch without a sequence.
        first = self._slice(0, 1, self.cu_seqlens.tolist())
        return replace(
            first,
            records=first.records[:0],
            by_token=_not_counting(first.by_token),
            by_sequence=_not_counting(first.by_sequence),
            # None would have them looked for.
            target_positions=None if self.target_positions is None else self.target_positions[:0],
        )

    def filled(self, shape: BatchShape) -> "PackedBatch":
        """The same sequences, then fillers: where every batch has the same shape, one compiled graph takes all.

        Fillers are sequences of token 0, at most ``max_seqlen`` long, then empty ones, without target, weight or
        record. Raises ValueError where the batch is larger than the shape.
        """
        T, N = self.num_tokens, self.num_sequences
        # None longer than the longest sequence, which is a part of the shape, too.
        fillers = [*range(T + shape.max_seqlen, shape.num_tokens, shape.max_seqlen)]
        fillers += [shape.num_tokens] * (shape.num_sequences - N - len(fillers))
        ends = [*self.cu_seqlens.tolist(), *fillers]
        fits = T <= shape.num_tokens == ends[-1] and N <= shape.num_sequences == len(ends) - 1
        if not fits or self.max_seqlen > shape.max_seqlen:
            raise ValueError(f"a batch of {T} tokens in {N} sequences can't be filled to {shape}")
        more_tokens, more_sequences = shape.num_tokens - T, shape.num_sequences - N
        return replace(
            self,
            tokens=torch.cat([self.tokens, self.tokens.new_zeros(more_tokens)]),
            cu_seqlens=torch.tensor(ends, dtype=self.cu_seqlens.dtype),
            max_seqlen=shape.max_seqlen,
            positions=torch.cat([self.positions, torch.arange(more_tokens) % shape.max_seqlen]),
            by_token=_with_fillers(self.by_token, more_tokens),
            by_sequence=_with_fillers(self.by_sequence, more_sequences),
        )

    def _slice(self, start: int, end: int, starts: list[int]) -> "PackedBatch":
        """Sequences ``start`` to ``end``; their target positions are not known."""
        sequences = slice(start, end)
        tokens = slice(starts[start], starts[end])
        return PackedBatch(
            tokens=self.tokens[tokens],
            cu_seqlens=self.cu_seqlens[start : end + 1] - starts[start],
            max_seqlen=max(after - before for before, after in pairwise(starts[start : end + 1])),
            positions=self.positions[tokens],
            records=self.records[sequences],
            by_token={name: tensor[tokens] for name, tensor in self.by_token.items()},
            by_sequence={name: tensor[sequences] for name, tensor in self.by_sequence.items()},
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "PackedBatch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PackedBatch":
        """The same batch in page-locked memory."""
        return self.map(lambda tensor: tensor.pin_memory())

    def map(self, function: Callable[[Any], Any]) -> "PackedBatch":
        """The same batch with ``function`` of every tensor instead of it."""
        return PackedBatch(
            tokens=function(self.tokens),
            cu_seqlens=function(self.cu_seqlens),
            max_seqlen=self.max_seqlen,
            positions=function(self.positions),
            records=function(self.records),
            by_token={name: function(tensor) for name, tensor in self.by_token.items()},
            by_sequence={name: function(tensor) for name, tensor in self.by_sequence.items()},
            target_positions=None if self.target_positions is None else function(self.target_positions),
        )


def _not_counting(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    counted = {name: tensors[name] for name in (TARGETS, WEIGHTS) if name in tensors}
    return {**tensors, **{name: torch.full_like(t, filler_value(name, t.dtype)) for name, t in counted.items()}}


def _with_fillers(tensors: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    return {
        name: torch.cat([tensor, tensor.new_full((rows, *tensor.shape[1:]), filler_value(name, tensor.dtype))])
        for name, tensor in tensors.items()
    }


def _even_bounds(sizes: list[int], count: int) -> list[int]:
    """Bounds that cut a row of sizes into ``count`` parts of at least one, each cut at the nearest to its share."""
    sums = [0, *accumulate(sizes)]
    bounds = [0]
    for piece in range(1, count):
        share = sums[-1] * piece / count
        after = bisect_left(sums, share)
        nearest = after - 1 if after and share - sums[after - 1] < sums[after] - share else after
        # At least one sequence for this part and for each that is still to come, whatever their lengths.
        bounds.append(min(max(nearest, bounds[-1] + 1), len(sizes) - count + piece))
    return [*bounds, len(sizes)]
