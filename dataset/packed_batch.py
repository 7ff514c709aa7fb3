"""The one data structure that runs from disk to loss: sequences end to end, nothing padded.

Shape legend: T tokens in the batch (special tokens included), N sequences, C columns of labels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

IGNORED_TARGET = -100
"""Target of a token that no loss looks at (PyTorch's ``ignore_index`` default)."""


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
    """

    tokens: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    positions: Tensor
    records: Tensor
    targets: Tensor | None = None
    weights: Tensor | None = None
    features: Tensor | None = None

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

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """The same batch with every tensor on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

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


def has_target(targets: Tensor) -> Tensor:
    """Which tokens or sequences a loss is taken of; their count is what loss sums are divided by.

    Args:
        targets: (T,) or (N,) int64, or (N, C) float; see :class:`PackedBatch`.

    Returns:
        (T,) or (N,) bool. A row of floats has a target where one of its columns, or more, is not NaN.
    """
    return ~targets.isnan().all(-1) if targets.is_floating_point() else targets != IGNORED_TARGET
