"""Training on structures as it is often written: PyTorch's DataLoader without processes, two proteins a batch, each
structure predicted when its batch is made, fp32, everything padded to one length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from dataset.packed_batch import IGNORED_TARGET, NO_LABEL, PackedBatch
from dataset.tokens.esm import EOS, MASK, PAD, packed_from_tokens, sequence_lengths, tokenize_pieces
from inference.folding.predictors import Predictor

BATCH = 2


class PaddedBatches:
    """Batches of hidden residues and predicted structures, padded to ``length`` residues."""

    def __init__(self, sequences: Sequence[str], predictor: Predictor, length: int) -> None:
        self._predictor, self._length = predictor, length
        self._loader: Any = DataLoader(list(sequences), batch_size=BATCH, collate_fn=self._collate)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[PackedBatch, int]]:
        """Each batch and its residues."""
        return iter(self._loader)

    def _collate(self, sequences: list[str]) -> tuple[PackedBatch, int]:
        longest = self._length + 2
        tokens = torch.full((len(sequences), longest), PAD)
        targets = torch.full((len(sequences), longest), IGNORED_TARGET)
        coordinates = torch.full((len(sequences), longest, 4, 3), torch.nan)
        for row, (sequence, found) in enumerate(zip(sequences, self._predictor.predict(sequences), strict=True)):
            inside = slice(1, len(sequence) + 1)
            tokens[row, : len(sequence) + 2] = torch.from_numpy(tokenize_pieces([sequence.encode()]).astype("int64"))
            assert tokens[row, len(sequence) + 1] == EOS
            hidden = torch.zeros(longest, dtype=torch.bool)
            hidden[inside] = torch.rand(len(sequence)) < torch.rand(())
            hidden[1] = True
            targets[row, hidden] = tokens[row, hidden]
            tokens[row, hidden] = MASK
            coordinates[row, inside] = torch.from_numpy(found.coordinates)
        batch = packed_from_tokens(tokens.flatten().numpy(), sequence_lengths([range(longest)] * len(sequences)))
        batch = replace(
            batch,
            targets=targets.flatten(),
            coordinates=coordinates.flatten(0, 1),
            chains=torch.zeros(tokens.numel(), dtype=torch.int64),
            labels=torch.full((len(sequences),), NO_LABEL),
        )
        return batch, sum(map(len, sequences))
