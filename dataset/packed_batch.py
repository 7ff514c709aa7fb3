"""The one data structure that runs from disk to loss: sequences end to end, nothing padded.

Shape legend: T tokens in the batch (special tokens included), N sequences.
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
        targets: (T,) int64 token ids with :data:`IGNORED_TARGET` where no loss is taken, or None.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    positions: Tensor
    records: Tensor
    targets: Tensor | None = None

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
