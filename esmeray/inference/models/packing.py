"""Pack texts, tokenized once, into batches.

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
    """A packed batch, and the (R,) int64 positions of its residues among its tokens.

    ``token_budget``: of further passes, for outputs that run the model themselves; None for the device's default.
    """

    batch: PackedBatch
    residues: Tensor
    token_budget: int | None = None

    @record_function("copy to device")
    def to(self, device: torch.device) -> "ModelInput":
        """Copy to a device. For CUDA the copy uses pinned memory, so that the host need not wait."""
        batch, residues_R = self.batch, self.residues
        if device.type == "cuda":  # a copy from pageable memory is synchronous, even with non_blocking
            batch, residues_R = batch.pin_memory(), residues_R.pin_memory()
        return ModelInput(batch.to(device, non_blocking=True), residues_R.to(device, non_blocking=True))


@dataclass(frozen=True)
class Tokenized:
    """Ids of N texts after cropping, without special tokens, and the (N,) int64 number of ids cropped per text."""

    pieces: Sequence[NDArray[np.int32]]
    cropped: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(N,) number of ids per text, after cropping."""
        return np.fromiter(map(len, self.pieces), dtype=np.int64, count=len(self.pieces))


def input_of_pieces(tokenizer: SequenceTokenizer, pieces: Sequence[NDArray[np.int32]]) -> ModelInput:
    """Pack pieces of ids, each between the tokenizer's special tokens, into one batch on the CPU."""
    prefix, suffix = (np.asarray(ids, dtype=np.int32) for ids in (tokenizer.prefix, tokenizer.suffix))
    tokens_T = np.concatenate([ids for piece in pieces for ids in (prefix, piece, suffix)])
    lengths_N = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    return model_input(tokenizer, tokens_T, lengths_N + prefix.size + suffix.size)


@record_function("pack")
def model_input(
    tokenizer: SequenceTokenizer, tokens_T: NDArray[np.integer], lengths_N: NDArray[np.int64]
) -> ModelInput:
    """Pack (T,) ids of N texts with these lengths, special tokens included, into one batch on the CPU."""
    batch = packed_from_tokens(tokens_T, lengths_N)
    # Computed on the CPU: nonzero on CUDA is a sync point, because the host needs the size of its result.
    return ModelInput(batch, residue_mask(batch, len(tokenizer.prefix), len(tokenizer.suffix)).nonzero()[:, 0])
