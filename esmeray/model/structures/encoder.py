"""Structure encoder: a vector per residue from backbone atoms, by message passing as in ProteinMPNN's encoder.

The input is a packed batch with coordinates, the output (T, H) features. Residues without coordinates get a learned
vector. The input features are invariant, so that rotation and translation do not change the output.

Shape legend: T tokens in the batch, k neighbours per residue, H channels.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.packed_batch import CHAINS, COORDINATES, PackedBatch
from esmeray.model.section import StructureEncoderSection
from esmeray.model.structures.geometry import (
    PAIR_FEATURES,
    RESIDUE_FEATURES,
    Neighbours,
    known_residues,
    nearest,
    pair_features,
    residue_features,
)
from esmeray.model.structures.proteinmpnn import CHANNELS, ProteinMPNN


class StructureEncoder(nn.Module):
    """Message passing on the graph of nearest neighbours (the encoder of Dauparas et al. 2022)."""

    def __init__(self, section: StructureEncoderSection, *, checkpointing: bool = False) -> None:
        super().__init__()
        channels = section.hidden_size
        self.neighbours, self._checkpointing = section.neighbours, checkpointing
        self.embed_pairs = nn.Sequential(nn.Linear(PAIR_FEATURES, channels), nn.LayerNorm(channels))
        self.embed_residues = nn.Sequential(nn.Linear(RESIDUE_FEATURES, channels), nn.LayerNorm(channels))
        self.layers = nn.ModuleList(
            _Layer(channels, section.dropout, ends=number == section.layers) for number in range(1, section.layers + 1)
        )
        self.unknown = nn.Parameter(torch.zeros(channels))  # zero at initialization, so that it adds nothing

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return (T, H) features in the dtype of the weights."""
        chains_T = batch.by_token[CHAINS]
        dtype = self.unknown.dtype
        with torch.no_grad():  # geometry is computed in fp32, whatever the dtype of the weights
            coordinates = batch.by_token[COORDINATES].float()
            known_T = known_residues(coordinates)
            # Mask the inputs instead of the results: NaN * 0 is NaN and would reach the gradients of the weights.
            atoms = torch.where(known_T[:, None, None], coordinates, 0.0)
            neighbours = nearest(atoms[:, 1], known_T, batch, self.neighbours)
            residues = residue_features(atoms, known_T, chains_T, batch).to(dtype)
            pairs = pair_features(atoms, neighbours, chains_T).to(dtype)
        hidden_TH, pairs_TkH = self.embed_residues(residues), self.embed_pairs(pairs)
        for layer in self.layers:
            run = partial(checkpoint, layer, use_reentrant=False) if self._checkpointing else layer
            hidden_TH, pairs_TkH = run(hidden_TH, pairs_TkH, neighbours)
        return torch.where(known_T[:, None], hidden_TH, self.unknown)


class TrainedEncoder(nn.Module):
    """Features of structures by trained weights of ProteinMPNN, fine-tuned or ``frozen``.

    The features are the states of its decoder before any residue has a letter. They predict residues better than the
    states of its encoder; see docs/structdiff.md. ProteinMPNN's own output layer is an offset of the logits, so that
    training starts from its predictions.
    """

    def __init__(self, network: ProteinMPNN, *, frozen: bool) -> None:
        super().__init__()
        self.network = network.requires_grad_(not frozen)
        network.W_s.requires_grad_(False)  # not used, since no residue has a letter
        self.unknown = nn.Parameter(torch.zeros(CHANNELS))  # as in StructureEncoder

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return (T, H) features in the dtype of the weights."""
        states_TH = self.network.states(self.network.graph(batch))
        known_T = self.network.known(batch.by_token[COORDINATES])
        return torch.where(known_T[:, None], states_TH, self.unknown)

    def letters(self, features_TH: Tensor) -> Tensor:
        """Return (T, 20) logits of the amino acids from features."""
        return self.network.W_out(features_TH)[:, : len(AMINO_ACIDS)]


class _Layer(nn.Module):
    """Layer of messages to residues, a feed-forward network, and messages to pairs, which the last layer leaves out."""

    def __init__(self, channels: int, dropout: float, *, ends: bool) -> None:
        super().__init__()
        self.to_residue, self.to_pair = _Message(channels), None if ends else _Message(channels)
        self.feed_forward = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2 if ends else 3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_TH: Tensor, pairs_TkH: Tensor, neighbours: Neighbours) -> tuple[Tensor, Tensor]:
        weights = neighbours.known.to(hidden_TH.dtype)[..., None]
        # Mean over known neighbours, so that residues with fewer neighbours get messages of the same scale.
        share = weights / weights.sum(1, keepdim=True).clamp(min=1)
        messages = (self.to_residue(hidden_TH, pairs_TkH, neighbours.indices) * share).sum(1)
        hidden_TH = self.norms[0](hidden_TH + self.dropout(messages))
        hidden_TH = self.norms[1](hidden_TH + self.dropout(self.feed_forward(hidden_TH)))
        if self.to_pair is None:
            return hidden_TH, pairs_TkH
        changed = self.to_pair(hidden_TH, pairs_TkH, neighbours.indices)
        return hidden_TH, self.norms[2](pairs_TkH + self.dropout(changed))


class _Message(nn.Module):
    """Messages from neighbours to residues, (T, k, H): a perceptron on both residues and their pair.

    Its first product is computed separately for residues and pairs, which is equivalent and takes a third of the work.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.own = nn.Linear(channels, channels)
        self.other, self.pair = (nn.Linear(channels, channels, bias=False) for _ in range(2))
        self.rest = nn.Sequential(
            nn.GELU(), nn.Linear(channels, channels), nn.GELU(), nn.Linear(channels, channels)
        )  # fmt: skip

    def forward(self, hidden_TH: Tensor, pairs_TkH: Tensor, indices_Tk: Tensor) -> Tensor:
        others = functional.embedding(indices_Tk, self.other(hidden_TH))
        return self.rest(self.own(hidden_TH)[:, None] + others + self.pair(pairs_TkH))
