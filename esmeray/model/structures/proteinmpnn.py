"""ProteinMPNN (Dauparas et al. 2022): a structure encoder, and a decoder of sequences in any order.

The tensors have the names of the published weights, so that converted files load strictly. The variant ``ca`` reads CA
atoms only; vanilla and soluble weights share one architecture, which reads N, CA, C, O and a virtual CB.

A residue without all its atoms gets no messages and sends none. Its features are 0.

Each message starts with a linear layer on concatenated features of both residues, their pair and the letter. Here, each
part is multiplied separately: products of residues and letters are computed once and gathered. A message ends with a
linear layer, which is applied after the sum over neighbours. Both are equivalent, at a third of the work.

Shape legend: T tokens in the batch, k neighbours per residue, C = 128 channels, R rows to decode (several sequences per
structure), M of these rows, P points of a residue whose distances are features.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from esmeray.dataset.packed_batch import CHAINS, COORDINATES, NUMBERS, PackedBatch
from esmeray.model.structures.geometry import Neighbours, known_residues, nearest, virtual_cb

Variant = Literal["backbone", "ca"]
LETTERS = "ACDEFGHIKLMNPQRSTVWYX"
"""Letters of the model in the order of its output; X is an unknown residue."""
CHANNELS = 128
NEIGHBOURS = 48
_LAYERS = 3
_MAX_OFFSET, _OTHER_CHAIN = 32, 65
"""Classes of offsets along the chain: -32 to 32, larger ones clamped, and any offset to another chain."""
_OFFSET_CHANNELS, _ORIENTATIONS = 16, 7
_OWN, _PAIR, _LETTER, _OTHER = range(4)
"""Parts of the input of a decoder layer's messages: the residue, the pair, the neighbour's letter and its state."""
_SCALE = 30.0
"""Divisor of a sum of messages. The same for all residues, also for those with fewer neighbours."""
_RADII, _WIDTH = torch.linspace(2.0, 22.0, 16), 1.25
"""Centres and width of the radial basis functions, in Å."""
_FAR = 1e4
"""Coordinate in Å of the missing neighbours of a break in a CA trace, too far for any radial basis function."""
_ROWS = 256
"""Number of residues whose messages are in memory at the same time; 256 of them fit into a CPU's cache."""
# Pairs of points in the order of the weights, as the residue's point and the neighbour's.
_POINT_PAIRS: dict[Variant, str] = {
    "backbone": "11 00 22 33 44 10 12 13 14 02 03 04 42 43 32 01 21 31 41 20 30 40 24 34 23",  # N, CA, C, O, CB
    "ca": "11 00 22 01 02 10 12 20 21",  # the CA before, of and after the residue
}


class Graph(NamedTuple):
    """Encoded structures: (T, C) residues, (T, k, C) pairs, and the neighbours of each residue."""

    hidden: Tensor
    pairs: Tensor
    neighbours: Neighbours


class ProteinMPNNEncoder(nn.Module):
    """Encoder of backbone structures: (T, 128) features that translation and rotation do not change.

    Features of the variant ca change with rotation, because the published weights were trained with such features.

    It reads coordinates and chains of a packed batch, and :data:`~esmeray.dataset.packed_batch.NUMBERS` if the batch
    has them; otherwise no residues count as missing.
    """

    def __init__(self, variant: Variant = "backbone", neighbours: int = NEIGHBOURS) -> None:
        super().__init__()
        self.variant, self.neighbours = variant, neighbours
        self.features = _PairFeatures(variant)
        self.W_e = nn.Linear(CHANNELS, CHANNELS)
        self.encoder_layers = nn.ModuleList(_EncoderLayer() for _ in range(_LAYERS))

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return (T, C) features in the dtype of the weights, 0 for residues without coordinates."""
        return self.graph(batch).hidden

    def known(self, coordinates_T43: Tensor) -> Tensor:
        """Return (T,) bool, true for residues with all atoms that the variant reads."""
        return known_residues(coordinates_T43 if self.variant == "backbone" else coordinates_T43[:, 1:2])

    def graph(self, batch: PackedBatch) -> Graph:
        """Encode the structures of a batch."""
        dtype = self.W_e.weight.dtype
        coordinates = batch.by_token[COORDINATES].float()
        known_T = self.known(coordinates)
        # NaN * 0 is NaN and would reach the gradients of the weights.
        atoms = torch.where(known_T[:, None, None], coordinates, 0.0)
        neighbours = nearest(atoms[:, 1], known_T, batch, self.neighbours)
        points = self.features.points(atoms, known_T, batch)
        pairs = _in_blocks(lambda rows: self.W_e(self.features(points, neighbours, batch, rows).to(dtype)), known_T)
        hidden = pairs.new_zeros(len(pairs), CHANNELS)
        for layer in self.encoder_layers:
            hidden, pairs = layer(hidden, pairs, neighbours)
            hidden = hidden * known_T[:, None]
        return Graph(hidden, pairs, neighbours)


class ProteinMPNN(ProteinMPNNEncoder):
    """Encoder and decoder. :func:`decode` runs the decoder."""

    def __init__(self, variant: Variant = "backbone", neighbours: int = NEIGHBOURS) -> None:
        super().__init__(variant, neighbours)
        self.W_s = nn.Embedding(len(LETTERS), CHANNELS)
        self.decoder_layers: Any = nn.ModuleList(_DecoderLayer() for _ in range(_LAYERS))
        self.W_out = nn.Linear(CHANNELS, len(LETTERS))

    def states(self, graph: Graph) -> Tensor:
        """Return (T, C) states of the decoder before any residue has a letter. Gradients reach all weights in use."""
        indices, known = graph.neighbours
        hidden = graph.hidden
        for layer in self.decoder_layers:
            others, blocks = layer(_OTHER, graph.hidden), []
            for rows in torch.arange(len(hidden), device=hidden.device).split(_ROWS):
                seen = layer(_PAIR, graph.pairs[rows]) + functional.embedding(indices[rows], others)
                blocks.append(layer.updated(hidden[rows], layer(_OWN, hidden[rows])[:, None] + seen, known[rows]))
            hidden = torch.cat(blocks)
        return hidden


def decode(
    model: ProteinMPNN,
    graph: Graph,
    rows_R: Tensor,
    ranks_R: Tensor,
    groups_R: Tensor,
    choose: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Give letters to sequences of encoded structures. In each step, all residues whose turn it is get theirs.

    A residue sees the letters and states of the neighbours that come before it, and only the structure of the others.

    Args:
        graph: encoded structures.
        rows_R: row of the graph that each residue has. All residues of a structure follow each other, in order.
        ranks_R: order in which the residues of a sequence get letters. Residues with equal ranks don't see each other.
        groups_R: numbers from 0; residues of a group have equal ranks, and get their letters in the same step.
        choose: function of row numbers (M,) and logits (M, 21) that returns the letters, as indices of :data:`LETTERS`.
    """
    in_graph_Rk, num_rows = graph.neighbours.indices[rows_R], len(graph.hidden)
    # A sequence is a copy of its structure's rows. Clamped, because unknown neighbours may lie outside.
    shift_R = torch.arange(len(rows_R), device=rows_R.device) - rows_R
    others_Rk = (in_graph_Rk + shift_R[:, None]).clamp(0, len(rows_R) - 1)
    earlier_Rk = (ranks_R[others_Rk] < ranks_R[:, None]) & graph.neighbours.known[rows_R]
    # A layer's table has the states of the structures first, then the states of the residues with letters.
    index_Rk = torch.where(earlier_Rk, num_rows + others_Rk, in_graph_Rk)
    layers = model.decoder_layers
    pairs = [torch.cat([layer(_PAIR, block) for block in graph.pairs.split(_ROWS)]) for layer in layers]
    tables = [functional.pad(layer(_OTHER, graph.hidden), (0, 0, 0, len(rows_R))) for layer in layers]
    waiting_R = torch.ones_like(rows_R, dtype=torch.bool)
    while waiting_R.any():
        blocked_G = torch.zeros_like(waiting_R)  # as many as rows, because there are at most as many groups
        blocked_G[groups_R[(waiting_R[others_Rk] & earlier_Rk).any(1)]] = True
        rows_M = (waiting_R & ~blocked_G[groups_R]).nonzero()[:, 0]
        in_graph_M = rows_R[rows_M]
        states = [graph.hidden[in_graph_M]]
        for layer, pair, table in zip(layers, pairs, tables, strict=True):
            inputs = layer(_OWN, states[-1])[:, None] + pair[in_graph_M] + functional.embedding(index_Rk[rows_M], table)
            states.append(layer.updated(states[-1], inputs, graph.neighbours.known[in_graph_M]))
        letters_M = model.W_s(choose(rows_M, model.W_out(states[-1])))
        for layer, table, hidden in zip(layers, tables, states, strict=False):
            table[num_rows + rows_M] = layer(_LETTER, letters_M) + layer(_OTHER, hidden)
        waiting_R[rows_M] = False


class _PairFeatures(nn.Module):
    """Features of pairs: offsets along the chain, distances in radial basis functions, and frames of CA traces."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.variant, self.pairs = variant, [(int(pair[0]), int(pair[1])) for pair in _POINT_PAIRS[variant].split()]
        inputs = _OFFSET_CHANNELS + len(_RADII) * len(self.pairs) + (_ORIENTATIONS if variant == "ca" else 0)
        self.embeddings = nn.ModuleDict({"linear": nn.Linear(_OTHER_CHAIN + 1, _OFFSET_CHANNELS)})
        self.edge_embedding = nn.Linear(inputs, CHANNELS, bias=False)
        self.norm_edges = nn.LayerNorm(CHANNELS)

    def points(self, atoms_T43: Tensor, known_T: Tensor, batch: PackedBatch) -> Tensor:
        """Return (T, P, 3) the points of each residue, and for CA traces the rows of its frame."""
        if self.variant == "backbone":
            return torch.cat([atoms_T43, virtual_cb(atoms_T43)[:, None]], dim=1)
        return _trace(atoms_T43[:, 1], known_T, batch)

    def forward(self, points_TP3: Tensor, neighbours: Neighbours, batch: PackedBatch, rows_M: Tensor) -> Tensor:
        """Return (M, k, C) features of rows and their neighbours."""
        others_Mk = neighbours.indices[rows_M]
        first, second = (list(points) for points in zip(*self.pairs, strict=True))
        own, other = points_TP3[rows_M, None], points_TP3[others_Mk]
        apart = (own[:, :, first] - other[:, :, second]).square().sum(-1)
        # + 1e-6 as in the original: the root has no derivative at 0, an atom's distance to itself.
        distances = (apart + 1e-6).sqrt()[..., None]
        radial = (-((distances - _RADII.to(distances)) / _WIDTH).square()).exp().flatten(2)
        features = [self._offsets(rows_M, others_Mk, batch), radial]
        if self.variant == "ca":
            features.append(_orientations(own[:, 0, 1], other[:, :, 1], own[:, 0, 3:], other[:, :, 3:]))
        return self.norm_edges(self.edge_embedding(torch.cat(features, dim=-1).to(self.edge_embedding.weight.dtype)))

    def _offsets(self, rows_M: Tensor, others_Mk: Tensor, batch: PackedBatch) -> Tensor:
        chains_T, numbers_T = batch.by_token[CHAINS], batch.by_token.get(NUMBERS, batch.positions)
        offsets = (numbers_T[rows_M, None] - numbers_T[others_Mk]).clamp(-_MAX_OFFSET, _MAX_OFFSET) + _MAX_OFFSET
        offsets = offsets.masked_fill(chains_T[rows_M, None] != chains_T[others_Mk], _OTHER_CHAIN)
        linear: Any = self.embeddings["linear"]
        return functional.embedding(offsets, linear.weight.T + linear.bias)


class _Layer(nn.Module):
    """Update of residues by messages and a feed-forward network, in the encoder and in the decoder."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.W1 = nn.Linear(parts * CHANNELS, CHANNELS)
        self.W2, self.W3 = (nn.Linear(CHANNELS, CHANNELS) for _ in range(2))
        self.norm1, self.norm2 = (nn.LayerNorm(CHANNELS) for _ in range(2))
        self.dense = nn.ModuleDict(
            {"W_in": nn.Linear(CHANNELS, 4 * CHANNELS), "W_out": nn.Linear(4 * CHANNELS, CHANNELS)}
        )

    def updated(self, hidden_MC: Tensor, inputs_MkC: Tensor, known_Mk: Tensor) -> Tensor:
        """Return (M, C) residues after messages; ``inputs`` are sums of the products of W1."""
        known = known_Mk[..., None].to(hidden_MC.dtype)
        messages = functional.gelu(self.W2(functional.gelu(inputs_MkC)))
        sums = functional.linear((messages * known).sum(1), self.W3.weight) + known.sum(1) * self.W3.bias
        hidden_MC = self.norm1(hidden_MC + sums / _SCALE)
        inner = functional.gelu(self.dense["W_in"](hidden_MC))
        return self.norm2(hidden_MC + self.dense["W_out"](inner))


class _EncoderLayer(_Layer):
    """Messages to residues, then to pairs."""

    def __init__(self) -> None:
        super().__init__(3)
        self.W11 = nn.Linear(3 * CHANNELS, CHANNELS)
        self.W12, self.W13 = (nn.Linear(CHANNELS, CHANNELS) for _ in range(2))
        self.norm3 = nn.LayerNorm(CHANNELS)

    def forward(self, hidden_TC: Tensor, pairs_TkC: Tensor, neighbours: Neighbours) -> tuple[Tensor, Tensor]:
        before, inputs = hidden_TC, _pair_inputs(self.W1, hidden_TC, pairs_TkC, neighbours)
        hidden_TC = _in_blocks(lambda rows: self.updated(before[rows], inputs(rows), neighbours.known[rows]), before)
        inputs_after = _pair_inputs(self.W11, hidden_TC, pairs_TkC, neighbours)

        def pairs(rows_M: Tensor) -> Tensor:
            messages = functional.gelu(self.W12(functional.gelu(inputs_after(rows_M))))
            return self.norm3(pairs_TkC[rows_M] + self.W13(messages))

        return hidden_TC, _in_blocks(pairs, before)


class _DecoderLayer(_Layer):
    """Messages to residues."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, part: int, inputs: Tensor) -> Tensor:
        """Return the product of a part of the first linear layer."""
        bias = self.W1.bias if part == _OWN else None
        return functional.linear(inputs, self.W1.weight[:, part * CHANNELS : (part + 1) * CHANNELS], bias)


def _pair_inputs(
    linear: nn.Linear, hidden_TC: Tensor, pairs_TkC: Tensor, neighbours: Neighbours
) -> Callable[[Tensor], Tensor]:
    """Function of rows (M,): (M, k, C) product of a linear layer with the residue, the pair and the neighbour."""
    own, pair, other = linear.weight.split(CHANNELS, dim=1)
    own_TC, others_TC = functional.linear(hidden_TC, own, linear.bias), functional.linear(hidden_TC, other)

    def inputs(rows_M: Tensor) -> Tensor:
        others_MkC = functional.embedding(neighbours.indices[rows_M], others_TC)
        return own_TC[rows_M, None] + functional.linear(pairs_TkC[rows_M], pair) + others_MkC

    return inputs


def _in_blocks(function: Callable[[Tensor], Tensor], of_rows: Tensor) -> Tensor:
    """Concatenated results for blocks of the rows of a tensor."""
    rows = torch.arange(len(of_rows), device=of_rows.device)
    return torch.cat([function(block) for block in rows.split(_ROWS)])


def _trace(ca_T3: Tensor, known_T: Tensor, batch: PackedBatch) -> Tensor:
    """Return (T, 6, 3): CA before, of and after each residue, and the rows of its frame, 0 if undefined.

    As in training of the published weights, the chains of a complex follow each other without a break.
    """
    segments_T, chains_T = batch.segment_ids(), batch.by_token[CHAINS]
    numbers_T = batch.by_token.get(NUMBERS, batch.positions)
    gap = (chains_T[1:] == chains_T[:-1]) & (numbers_T[1:] - numbers_T[:-1] > 1)
    linked = known_T[1:] & known_T[:-1] & (segments_T[1:] == segments_T[:-1])
    adjacent = (linked & ~gap)[:, None]
    before = functional.pad(torch.where(adjacent, ca_T3[:-1], _FAR), (0, 0, 1, 0), value=_FAR)
    after = functional.pad(torch.where(adjacent, ca_T3[1:], _FAR), (0, 0, 0, 1), value=_FAR)
    steps = ca_T3[1:] - ca_T3[:-1]
    lengths = steps.norm(dim=-1, keepdim=True)
    bonded = adjacent & (lengths > 3.6) & (lengths < 4.0)  # a bond of CA atoms; other steps are jumps
    bonds = torch.where(bonded, steps / lengths.clamp(min=1e-12), 0.0)
    u, v = functional.pad(bonds, (0, 0, 1, 0)), functional.pad(bonds, (0, 0, 0, 1))  # to and from the residue
    # The original computes no frame for the first residue and the last two residues of a record.
    inside = functional.pad(segments_T[2:] == segments_T[:-2], (0, 2)) & (batch.positions > 0)
    x, normal = functional.normalize(u - v, dim=-1), functional.normalize(torch.linalg.cross(u, v), dim=-1)
    frames = torch.stack([x, normal, torch.linalg.cross(x, normal)], dim=1)
    frames = torch.where(inside[:, None, None], frames, 0.0)
    return torch.cat([torch.stack([before, ca_T3, after], dim=1), frames], dim=1)


def _orientations(own_M3: Tensor, other_Mk3: Tensor, frames_M33: Tensor, other_frames_Mk33: Tensor) -> Tensor:
    """Return (M, k, 7): direction of the neighbour in the residue's frame, and a quaternion of both frames.

    The quaternion is the published one, of the product F_i^T F_j. A rotation of the structure changes it; F_i F_j^T
    would not.
    """
    away = (frames_M33[:, None] @ (other_Mk3 - own_M3[:, None])[..., None])[..., 0]
    rotation = frames_M33.transpose(1, 2)[:, None] @ other_frames_Mk33
    a, b, c = rotation.diagonal(dim1=-2, dim2=-1).unbind(-1)
    sizes = 0.5 * (1 + torch.stack([a - b - c, b - a - c, c - a - b], dim=-1)).abs().sqrt()
    skew = rotation - rotation.transpose(-1, -2)
    signs = torch.stack([skew[..., 2, 1], skew[..., 0, 2], skew[..., 1, 0]], dim=-1).sign()
    w = (1 + a + b + c).relu().sqrt() / 2
    quaternion = torch.cat([signs * sizes, w[..., None]], dim=-1)
    return torch.cat([functional.normalize(away, dim=-1), functional.normalize(quaternion, dim=-1)], dim=-1)
