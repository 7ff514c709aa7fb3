"""Proteins as bags of gapped k-mers, for :mod:`esmeray.model.heads.relatives`: no layers, and nothing learnt by steps.

A token's features are the sum of a vector for each pattern of three residues that begins there, so that the mean over
a protein's residues is a linear map of its counts (Leslie & Kuang 2004, "Fast string kernels using inexact matching").

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
"""Places of the residues of a k-mer, from the first of them."""
RESIDUES = len(STANDARD_RESIDUES)
KMERS = RESIDUES**3
"""Of each pattern."""
_FIRST = int(STANDARD_RESIDUES[0])


def codes_of(tokens_T: Tensor, segments_T: Tensor) -> Tensor:
    """(T, P) int64: the k-mer of each pattern that begins at a token, those of later patterns after those of earlier.

    The number of all k-mers where one of its tokens is no standard residue, or of another sequence.
    """
    residues_T = tokens_T.long() - _FIRST
    width = max(places[-1] for places in PATTERNS)
    # Beyond the last token there is none, as for a special token.
    padded = functional.pad(residues_T, (0, width), value=-1)
    segments = functional.pad(segments_T, (0, width), value=-1)
    columns = []
    for number, places in enumerate(PATTERNS):
        of_places = [padded[place : place + len(residues_T)] for place in places]
        is_whole_T = segments[places[-1] : places[-1] + len(residues_T)] == segments_T
        code_T = torch.full_like(residues_T, number)
        for residue_T in of_places:
            is_whole_T = is_whole_T & (residue_T >= 0) & (residue_T < RESIDUES)
            code_T = code_T * RESIDUES + residue_T
        columns.append(code_T.where(is_whole_T, len(PATTERNS) * KMERS))
    return torch.stack(columns, 1)


class _Network(nn.Module):
    """The table, and its size as networks of transformers have it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # The last row is that of what is no k-mer.
        self.table = nn.Embedding(len(PATTERNS) * KMERS + 1, channels)
        sizes = {"model_type": "gapped_kmers", "hidden_size": channels, "num_hidden_layers": 0}
        self.config = SimpleNamespace(**sizes, to_dict=lambda: sizes)


class KmerBackbone(PackedBackbone):
    """See the module; batches are in the ESM alphabet."""

    def __init__(self, channels: int) -> None:
        super().__init__(_Network(channels), frozen=True)

    @property
    def layers(self) -> nn.ModuleList:
        return nn.ModuleList()

    def _hidden_states(self, batch: PackedBatch, layers: Set[int]) -> dict[int, Tensor]:
        codes_TP = codes_of(batch.tokens, batch.segment_ids())
        features_TD = functional.embedding_bag(codes_TP, self.model.table.weight, mode="sum")
        return dict.fromkeys(layers, features_TD)
