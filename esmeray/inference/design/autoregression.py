"""Designs and likelihoods of ProteinMPNN, which draws one residue after the other, in a random order per design.

Structures and designs of a batch are packed without padding. A structure is encoded once for all its designs. In each
step, all residues whose earlier neighbours are decided are drawn at once.

Residues without coordinates keep the structure's letter, and are not scored.

Shape legend: T residues of the structures, R residues of all designs, M residues of a step, G groups of tied positions.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.packed_batch import CHAINS, COORDINATES, NUMBERS, PackedBatch
from esmeray.dataset.structures.store import Structure, chain_positions
from esmeray.dataset.tokens.esm import VOCABULARY, packed_from_tokens
from esmeray.inference.design.sampling import AMINO_ACID_IDS, Request, drawn_residues
from esmeray.model.structures.proteinmpnn import LETTERS, Decoding, Graph, ProteinMPNN

_NUM_LETTERS = len(AMINO_ACIDS)


class AutoregressiveDesigner:
    """Designer by ProteinMPNN; see :class:`~esmeray.inference.design.sampling.Designer`."""

    labels: tuple[str, ...] = ()
    unsupported = "label", "length", "steps", "guidance"
    draws = 4

    def __init__(self, model: ProteinMPNN, weights: str) -> None:
        self._model, self.weights, self.device = model, weights, model.W_e.weight.device
        self.network: nn.Module = model

    def designed(self, structure: Structure) -> NDArray[np.bool_]:
        return self._model.known(torch.from_numpy(structure.coordinates)).numpy()

    def designs(self, requests: Sequence[Request], generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        graph, rows_R = self._encoded([request.structure for request in requests])
        text = "".join(request.letters for request in requests)
        groups_R, kept_R, designed_R, bias_R20, ranks_R, uniform_G20, temperature_R = self._draws(requests, generators)
        # Residues without coordinates do not count in the mean of tied residues.
        sizes_G = torch.bincount(groups_R, designed_R.float()).clamp(min=1)
        tokens_R = torch.tensor([VOCABULARY.index(letter) for letter in text], device=self.device)
        letters_R = _indices(text, self.device)
        probabilities_R20 = (tokens_R[:, None] == AMINO_ACID_IDS.to(self.device)).float()  # 1 for kept residues
        decoding = Decoding(self._model, graph, rows_R, ranks_R)
        waiting_R = torch.ones_like(kept_R)
        while waiting_R.any():
            blocked_G = torch.zeros_like(sizes_G, dtype=torch.bool)
            blocked_G[groups_R[decoding.blocked(waiting_R)]] = True  # tied residues are drawn together
            rows_M = (waiting_R & ~blocked_G[groups_R]).nonzero()[:, 0]
            groups_M = groups_R[rows_M]
            logits, states = decoding.logits(rows_M)
            # Tied positions share the mean of their logits, because one residue has to suit all of them.
            biased = (logits[:, :_NUM_LETTERS] + bias_R20[rows_M]).masked_fill(~designed_R[rows_M, None], 0)
            sums = biased.new_zeros(len(sizes_G), _NUM_LETTERS).index_add_(0, groups_M, biased)
            mean_M = sums[groups_M] / sizes_G[groups_M, None]
            log_p, drawn = drawn_residues(mean_M, temperature_R[rows_M, None], uniform_G20[groups_M])
            letters_R[rows_M] = torch.where(kept_R[rows_M], letters_R[rows_M], drawn)
            probabilities_R20[rows_M] = torch.where(kept_R[rows_M, None], probabilities_R20[rows_M], log_p.exp())
            decoding.decide(rows_M, letters_R[rows_M], states)
            waiting_R[rows_M] = False
        # A kept residue may have a letter that the model reads as X.
        drawn_tokens = AMINO_ACID_IDS.to(self.device)[letters_R.clamp(max=_NUM_LETTERS - 1)]
        return torch.where(kept_R, tokens_R, drawn_tokens), probabilities_R20

    def log_p(self, structure: Structure, texts: Sequence[str], draws: Sequence[int], label: int) -> Tensor:
        graph, rows_R = self._encoded([structure] * len(texts))
        # The order of a draw is the same for all sequences.
        orders = [torch.rand(len(texts[0]), generator=torch.Generator().manual_seed(draw)) for draw in draws]
        letters_R = _indices("".join(texts), self.device)
        logits = Decoding(self._model, graph, rows_R, torch.cat(orders).to(self.device)).all_logits(letters_R)
        log_p = logits.log_softmax(-1).gather(-1, letters_R[:, None])[:, 0].view(len(texts), -1)
        judged = (letters_R < _NUM_LETTERS).view_as(log_p) & torch.from_numpy(self.designed(structure)).to(self.device)
        return log_p.masked_fill(~judged, torch.nan)

    def _encoded(self, structures: Sequence[Structure]) -> tuple[Graph, Tensor]:
        """Return the graph of the distinct structures, and the (R,) row in it of each residue of all structures."""
        distinct = list({id(structure): structure for structure in structures}.values())
        lengths = np.array([len(structure.residues) for structure in distinct])
        rows_of = np.split(np.arange(lengths.sum()), np.cumsum(lengths)[:-1])
        rows_by_id = {id(structure): rows for structure, rows in zip(distinct, rows_of, strict=True)}
        rows = np.concatenate([rows_by_id[id(structure)] for structure in structures])
        return self._model.graph(structures_batch(distinct).to(self.device)), torch.from_numpy(rows).to(self.device)

    def _draws(self, requests: Sequence[Request], generators: Sequence[torch.Generator]) -> list[Tensor]:
        """Return (R,) groups, kept, designed, (R, 20) bias, (R,) ranks, (G, 20) random numbers, (R,) temperatures."""
        columns: list[list[Tensor]] = []
        num_groups = 0
        for request, generator in zip(requests, generators, strict=True):
            groups_L = torch.from_numpy(request.groups)
            length, G = len(groups_L), int(groups_L.max()) + 1
            designed_L = torch.from_numpy(self.designed(request.structure))
            # A group is kept if a residue of it is fixed, or none of them can be designed.
            kept_G = torch.ones(G, dtype=torch.bool)
            kept_G[groups_L[designed_L]] = False
            kept_G[groups_L[list(request.fixed)]] = True
            kept_L = kept_G[groups_L]
            # Kept residues come first, so that all others see them.
            keys_G = torch.rand(G, generator=generator) + ~kept_G
            uniform = torch.rand(G, _NUM_LETTERS, generator=generator)
            bias = torch.from_numpy(request.bias).expand(length, -1)
            temperature = torch.full((length,), request.temperature)
            columns.append([groups_L + num_groups, kept_L, designed_L, bias, keys_G[groups_L], uniform, temperature])
            num_groups += G
        return [torch.cat(column).to(self.device) for column in zip(*columns, strict=True)]


def structures_batch(structures: Sequence[Structure]) -> PackedBatch:
    """Pack structures without special tokens. The tokens are 0, since the encoder does not read them."""
    lengths = np.array([len(structure.residues) for structure in structures])
    arrays = {
        COORDINATES: np.concatenate([structure.coordinates for structure in structures]),
        CHAINS: np.concatenate([structure.chains for structure in structures]).astype(np.int64),
        NUMBERS: np.concatenate([chain_positions(structure.packed_numbers) for structure in structures]),
    }
    by_token = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return packed_from_tokens(np.zeros(lengths.sum(), np.int64), lengths, by_token=by_token)


def _indices(text: str, device: torch.device) -> Tensor:
    """(R,) indices of letters in the model's output; all other letters are read as X."""
    return torch.tensor([LETTERS.find(letter) % len(LETTERS) for letter in text], device=device)
