"""Proteins as bags of gapped k-mers, for :mod:`esmeray.model.heads.relatives`: no layers, no gradient training.

A token's features are the sum of one vector per pattern of three residues that starts at it. The mean over a protein's
residues is then a linear map of its k-mer counts (Leslie & Kuang 2004, "Fast string kernels using inexact matching").

Shape legend: T tokens of a batch, P patterns, D channels.
"""

from collections.abc import Set
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

from esmeray.dataset.packed_batch import PackedBatch
from esmeray.dataset.tokens.esm import STANDARD_RESIDUES
from esmeray.model.backbones.base import PackedBackbone

PATTERNS = ((0, 1, 2), (0, 1, 3), (0, 2, 3), (0, 1, 4), (0, 3, 4), (0, 2, 4), (0, 1, 5), (0, 4, 5))
"""Offsets of a k-mer's residues from the first one, per pattern."""
RESIDUES = len(STANDARD_RESIDUES)
KMERS = RESIDUES**3
"""Number of k-mers per pattern."""
_FIRST = int(STANDARD_RESIDUES[0])


def codes_of(tokens_T: Tensor, segments_T: Tensor) -> Tensor:
    """Return (T, P) int64 codes: the k-mer of each pattern that starts at a token; codes are offset by pattern.

    The code is the total number of k-mers if a token of the k-mer is not a standard residue, or of another sequence.
    """
    residues_T = tokens_T.long() - _FIRST
    width = max(offsets[-1] for offsets in PATTERNS)
    # Positions beyond the last token count as non-residues, like special tokens.
    padded = functional.pad(residues_T, (0, width), value=-1)
    segments = functional.pad(segments_T, (0, width), value=-1)
    columns = []
    for number, offsets in enumerate(PATTERNS):
        letters = [padded[offset : offset + len(residues_T)] for offset in offsets]
        is_whole_T = segments[offsets[-1] : offsets[-1] + len(residues_T)] == segments_T
        code_T = torch.full_like(residues_T, number)
        for residue_T in letters:
            is_whole_T = is_whole_T & (residue_T >= 0) & (residue_T < RESIDUES)
            code_T = code_T * RESIDUES + residue_T
        columns.append(code_T.where(is_whole_T, len(PATTERNS) * KMERS))
    return torch.stack(columns, 1)


class _Network(nn.Module):
    """The table of vectors, with a config like transformers' networks."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # The last row is for positions without a k-mer.
        self.table = nn.Embedding(len(PATTERNS) * KMERS + 1, channels)
        sizes = {"model_type": "gapped_kmers", "hidden_size": channels, "num_hidden_layers": 0}
        self.config = SimpleNamespace(**sizes, to_dict=lambda: sizes)


class KmerBackbone(PackedBackbone):
    """Backbone of gapped k-mers (see the module); batches are in the ESM alphabet."""

    def __init__(self, channels: int) -> None:
        super().__init__(_Network(channels), frozen=True)

    @property
    def layers(self) -> nn.ModuleList:
        return nn.ModuleList()

    def _hidden_states(self, batch: PackedBatch, layers: Set[int]) -> dict[int, Tensor]:
        codes_TP = codes_of(batch.tokens, batch.segment_ids())
        features_TD = functional.embedding_bag(codes_TP, self.model.table.weight, mode="sum")
        return dict.fromkeys(layers, features_TD)
