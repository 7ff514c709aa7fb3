"""A network that finds relatives: bags of gapped k-mers as features, a fitted head, and the folder of both.

A token's features are the sum of one vector per pattern of three residues that starts at it. The mean over a protein's
residues is then a linear map of its k-mer counts (Leslie & Kuang 2004, "Fast string kernels using inexact matching").
There are no layers, and no gradient training.

The head makes vectors that are close for proteins of one group, by kernel ridge regression. The kernel of two proteins
is exp(2 (cosine - 1)) of their mean features, centred by the mean over the training proteins. Groups are regressed with
it (Saunders et al. 1998, "Ridge regression learning algorithm in dual variables"). A vector is the prediction of the
regression, in the directions that the kernel explains best.

``embed run`` takes the folder as a model.

Shape legend: T tokens of a batch, P patterns, N proteins, L training proteins, D channels of features, C channels of a
vector.
"""

from collections.abc import Set
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from esmeray.common.errors import parsing
from esmeray.common.publishing import verified
from esmeray.dataset.embeddings.manifest import TRAINING_FILE
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.dataset.tokens.esm import STANDARD_RESIDUES
from esmeray.model.backbones.base import PackedBackbone, empty_weights
from esmeray.model.export.exported_folder import REMEDY, exported_folder
from esmeray.model.optimization import in_blocks

TASK = "relatives"
"""Task in the folder's manifest, and name of the head."""
_FILE = "relatives.safetensors"
_TABLE = "table"
PATTERNS = ((0, 1, 2), (0, 1, 3), (0, 2, 3), (0, 1, 4), (0, 3, 4), (0, 2, 4), (0, 1, 5), (0, 4, 5))
"""Offsets of a k-mer's residues from the first one, per pattern."""
RESIDUES = len(STANDARD_RESIDUES)
KMERS = RESIDUES**3
"""Number of k-mers per pattern."""
_FIRST = int(STANDARD_RESIDUES[0])
_ROWS = 32
"""Proteins per product. It is fixed, so that a vector does not depend on the size of its batch."""


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


class RelativesHead(nn.Module):
    """Head that computes the vectors. Its buffers stay fp32 when a model is cast, like every head's."""

    mean: Tensor
    learnt: Tensor
    coefficients: Tensor

    def __init__(self, mean_D: Tensor, learnt_LD: Tensor, coefficients_LC: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean_D)
        self.register_buffer("learnt", learnt_LD)
        self.register_buffer("coefficients", coefficients_LC)

    def forward(self, means_ND: Tensor) -> Tensor:
        """Return (N, C) fp32 vectors from mean features."""
        unit_ND = functional.normalize(means_ND.float() - self.mean, dim=1)
        return in_blocks(lambda rows_nD: kernel(rows_nD, self.learnt) @ self.coefficients, unit_ND, _ROWS)


def kernel(unit_ND: Tensor, learnt_LD: Tensor) -> Tensor:
    """Return the (N, L) kernel of features with norm 1."""
    return torch.exp(2 * (unit_ND @ learnt_LD.T - 1))


def write_relatives(
    table: Tensor, head: RelativesHead, hashes_L: NDArray[np.uint64], folder: Path, overwrite: bool
) -> None:
    """Write the folder. ``table``: table of :class:`KmerBackbone`; ``hashes_L``: XXH3-64 of the training sequences.

    Raises the same errors as :func:`exported_folder`.
    """
    with exported_folder(folder, TASK, overwrite, None) as (building, _):
        # fp16 halves the file; its rounding is much smaller than the uncertainty of k-mer vectors.
        state = {name: tensor.half().contiguous() for name, tensor in (*head.state_dict().items(), (_TABLE, table))}
        save_file(state, building / _FILE)
        np.save(building / TRAINING_FILE, hashes_L)


def load_relatives(folder: Path) -> tuple[KmerBackbone, RelativesHead]:
    """Load the model of a folder, in fp32 on the CPU. Raises DataError if its file is damaged."""
    with parsing(folder / _FILE, REMEDY, SafetensorError):
        state = {name: tensor.float() for name, tensor in load_file(verified(folder / _FILE)).items()}
        table = state.pop(_TABLE)
        head = RelativesHead(*(state[name] for name in ("mean", "learnt", "coefficients")))
    with empty_weights():  # initializing a table takes longer than reading one
        backbone = KmerBackbone(table.shape[1])
    backbone.model.table.load_state_dict({"weight": table}, assign=True)
    return backbone, head
