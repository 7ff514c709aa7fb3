"""Packed batch, the data structure from disk to loss: concatenated sequences without padding.

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
"""Label of a sequence without a class to condition on."""

TARGETS = "targets"
"""Values to predict. Per token: (T,) int64 ids or classes of residues. Per sequence: (N,) int64 classes, or (N, C)
float32 of 0, 1 and other numbers. The loss ignores :data:`IGNORED_TARGET` and NaN."""
WEIGHTS = "weights"
"""Weight of each sequence in the loss, (N,) float32; default: 1."""
FEATURES = "features"
"""Cached outputs of a frozen backbone: (T, D) float32 per token, or (N, D) pooled per sequence."""
COORDINATES = "coordinates"
"""Coordinates of each token's N, CA, C and O in Å, (T, 4, 3) float32; NaN if unknown and for special tokens."""
CHAINS = "chains"
"""Number of each token's chain in its structure, (T,) int64."""
NUMBERS = "numbers"
"""Position of each token along its chain, (T,) int64, in which missing residues count; see
:func:`~esmeray.dataset.structures.store.chain_positions`."""
LABELS = "labels"
"""Class to condition each sequence on, (N,) int64, or :data:`NO_LABEL`."""


_FILLERS: dict[str, tuple[int, float]] = {
    TARGETS: (IGNORED_TARGET, torch.nan),
    COORDINATES: (0, torch.nan),
    LABELS: (NO_LABEL, 0.0),
}
"""Values of a row that does not count, as integer and float, for names in which 0 has a meaning."""


def filler_value(name: str, dtype: torch.dtype) -> float:
    """Return the value of a named tensor in rows that do not count."""
    integer, number = _FILLERS.get(name, (0, 0.0))
    return number if dtype.is_floating_point else integer


class BatchShape(NamedTuple):
    """Fixed T, N and maximum sequence length of batches; see :meth:`PackedBatch.filled`."""

    num_tokens: int
    num_sequences: int
    max_seqlen: int


@dataclass(frozen=True)
class PackedBatch:
    """Sequences of different lengths, concatenated.

    Attributes:
        tokens: (T,) int64, token ids, special tokens included.
        cu_seqlens: (N+1,) int32, start of each sequence; ``cu_seqlens[-1] == T``.
        max_seqlen: length in tokens of the longest sequence.
        positions: (T,) int64, position of each token in its own sequence, from 0.
        records: (N,) int64, index of each sequence in its store.
        by_token: named tensors per token, (T, ...), with names defined in this module.
        by_sequence: named tensors per sequence, (N, ...), with names defined in this module.
        target_positions: (M,) int64, positions of tokens with a target, ascending. None if they must be searched, which
            on CUDA is a CPU-GPU sync point.
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
        """Return (T,) int64: the index in 0..N-1 of each token's sequence."""
        lengths_N = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()
        # output_size avoids a CPU-GPU sync point.
        return torch.repeat_interleave(
            torch.arange(self.num_sequences, device=lengths_N.device), lengths_N, output_size=self.num_tokens
        )

    @property
    def targets(self) -> Tensor:
        """Targets by token or by sequence. Raises ValueError if the batch has none."""
        targets = self.named(TARGETS)
        if targets is None:
            raise ValueError("this task needs a batch with targets")
        return targets

    def find_targets(self) -> Tensor:
        """Return (M,) int64: positions of the tokens with a target; see :attr:`target_positions`."""
        known = self.target_positions
        return (self.targets != IGNORED_TARGET).nonzero().squeeze(-1) if known is None else known

    def named(self, name: str) -> Tensor | None:
        """Return the tensor of this name, by token or by sequence, or None."""
        return self.by_token.get(name, self.by_sequence.get(name))

    def adding(
        self, by_token: Mapping[str, Tensor] | None = None, by_sequence: Mapping[str, Tensor] | None = None
    ) -> "PackedBatch":
        """Return the batch with these named tensors added or replaced."""
        return replace(
            self,
            by_token={**self.by_token, **(by_token or {})},
            by_sequence={**self.by_sequence, **(by_sequence or {})},
        )

    def pieces(self, count: int) -> list["PackedBatch"]:
        """Split the batch, in order, into at most ``count`` parts of whole sequences and similar numbers of tokens."""
        count = min(count, self.num_sequences)
        if count <= 1:
            return [self]
        starts = self.cu_seqlens.tolist()
        sizes_N = [end - start for start, end in pairwise(starts)]
        if not self.num_tokens:
            sizes_N = [1] * self.num_sequences  # pooled features have no tokens: balance by sequences
        return [self._slice(start, end, starts) for start, end in pairwise(_even_bounds(sizes_N, count))]

    def without_targets(self) -> "PackedBatch":
        """Return a filler: only the first sequence, without targets, so it adds nothing to loss, metrics or counts."""
        # With one sequence, because models need at least one.
        first = self._slice(0, 1, self.cu_seqlens.tolist())
        return replace(
            first,
            records=first.records[:0],
            by_token=_not_counting(first.by_token),
            by_sequence=_not_counting(first.by_sequence),
            # Keep it known (empty), because None would trigger a search.
            target_positions=None if self.target_positions is None else self.target_positions[:0],
        )

    def filled(self, shape: BatchShape) -> "PackedBatch":
        """Return the same sequences plus fillers, so that one compiled graph serves all batches.

        Fillers are sequences of token 0, at most ``max_seqlen`` long, then empty ones, without target, weight or
        record. Raises ValueError if the batch is larger than the shape.
        """
        T, N = self.num_tokens, self.num_sequences
        # At most max_seqlen per filler, because the longest sequence is part of the shape.
        fillers = [*range(T + shape.max_seqlen, shape.num_tokens, shape.max_seqlen)]
        fillers += [shape.num_tokens] * (shape.num_sequences - N - len(fillers))
        ends = [*self.cu_seqlens.tolist(), *fillers]
        fits = T <= shape.num_tokens == ends[-1] and N <= shape.num_sequences == len(ends) - 1
        if not fits or self.max_seqlen > shape.max_seqlen:
            raise ValueError(f"a batch of {T} tokens in {N} sequences can't be padded to {shape}")
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
        """Return sequences ``start`` to before ``end``, without known target positions."""
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
        """Return the batch in page-locked memory."""
        return self.map(lambda tensor: tensor.pin_memory())

    def map(self, function: Callable[[Any], Any]) -> "PackedBatch":
        """Return the batch with ``function`` applied to every tensor."""
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
    """Return bounds that split ``sizes`` into ``count`` non-empty parts with sums as equal as possible."""
    sums = [0, *accumulate(sizes)]
    bounds = [0]
    for piece in range(1, count):
        share = sums[-1] * piece / count
        after = bisect_left(sums, share)
        nearest = after - 1 if after and share - sums[after - 1] < sums[after] - share else after
        # Leave at least one sequence for this part and for each later one.
        bounds.append(min(max(nearest, bounds[-1] + 1), len(sizes) - count + piece))
    return [*bounds, len(sizes)]
