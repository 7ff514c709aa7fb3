"""Texts as ids, which are tokenised once, to packed batches.

Shape legend: N texts, T tokens of a batch, R residues of all its texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import record_function

from esmeray.dataset.packed_batch import PackedBatch
from esmeray.dataset.tokens.base import SequenceTokenizer
from esmeray.dataset.tokens.esm import packed_from_tokens
from esmeray.model.heads.pooling import residue_mask


class ModelInput(NamedTuple):
    """A packed batch, and (R,) int64 the positions of its residues among its tokens."""

    batch: PackedBatch
    residues: Tensor

    @record_function("copy to device")
    def to(self, device: torch.device) -> "ModelInput":
        """The same on a device, from pinned memory where that is CUDA, so that the host need not wait."""
        batch, residues_R = self.batch, self.residues
        if device.type == "cuda":  # a copy from pageable memory is no asynchronous one, whatever is asked for
            batch, residues_R = batch.pin_memory(), residues_R.pin_memory()
        return ModelInput(batch.to(device, non_blocking=True), residues_R.to(device, non_blocking=True))


@dataclass(frozen=True)
class Tokenized:
    """Ids of N texts that are used, without special tokens, and (N,) int64 how many of each are not."""

    pieces: Sequence[NDArray[np.int32]]
    cropped: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(N,) ids of each text that are used."""
        return np.fromiter(map(len, self.pieces), dtype=np.int64, count=len(self.pieces))


def input_of_pieces(tokenizer: SequenceTokenizer, pieces: Sequence[NDArray[np.int32]]) -> ModelInput:
    """Pieces of ids, each between the tokenizer's special tokens, as one batch on the CPU."""
    prefix, suffix = (np.asarray(ids, dtype=np.int32) for ids in (tokenizer.prefix, tokenizer.suffix))
    tokens_T = np.concatenate([ids for piece in pieces for ids in (prefix, piece, suffix)])
    lengths_N = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    return model_input(tokenizer, tokens_T, lengths_N + prefix.size + suffix.size)


@record_function("pack")
def model_input(
    tokenizer: SequenceTokenizer, tokens_T: NDArray[np.integer], lengths_N: NDArray[np.int64]
) -> ModelInput:
    """(T,) ids of N texts of these lengths, special tokens included, as one batch on the CPU."""
    batch = packed_from_tokens(tokens_T, lengths_N)
    # Found here, on the CPU: nonzero on CUDA waits for the device, as its result has a size that the host must know.
    return ModelInput(batch, residue_mask(batch, len(tokenizer.prefix), len(tokenizer.suffix)).nonzero()[:, 0])
