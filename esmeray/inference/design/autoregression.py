"""Designs and likelihoods of ProteinMPNN, which draws one residue after the other, in a random order per design.

Structures and designs of a batch are packed without padding. A structure is encoded once for all its designs. In each
step, all residues whose earlier neighbours are decided are drawn at once.

Residues without coordinates keep the structure's letter, and are not scored.

Shape legend: T residues of the structures, R residues of all designs, M residues of a step, G groups of tied positions.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.packed_batch import CHAINS, COORDINATES, NUMBERS, PackedBatch
from esmeray.dataset.structures.store import Structure, chain_positions
from esmeray.dataset.tokens.esm import VOCABULARY, packed_from_tokens
from esmeray.inference.design.sampling import AMINO_ACID_IDS, Request, drawn_residues
from esmeray.model.structures.proteinmpnn import LETTERS, ProteinMPNN, decode

_NUM_LETTERS = len(AMINO_ACIDS)


class AutoregressiveDesigner:
    """Designer by ProteinMPNN; see :class:`~esmeray.inference.design.sampling.Designer`."""

    labels: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = "label", "length", "steps", "guidance"
    draws = 4

    def __init__(self, model: ProteinMPNN, weights: str) -> None:
        self._model, self.weights, self.device = model, weights, model.W_e.weight.device
        self.network: nn.Module = model

    def designed(self, structure: Structure) -> NDArray[np.bool_]:
        return self._model.known(torch.from_numpy(structure.coordinates)).numpy()

    def designs(self, requests: Sequence[Request], generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        letters_R, log_p_R20, kept_R = self._decoded(requests, generators)
        text = "".join(request.letters for request in requests)
        # A kept residue may have a letter that the model reads as X.
        given_R = torch.tensor([VOCABULARY.index(letter) for letter in text], device=self.device)
        ids = AMINO_ACID_IDS.to(self.device)
        tokens_R = torch.where(kept_R, given_R, ids[letters_R.clamp(max=_NUM_LETTERS - 1)])
        return tokens_R, torch.where(kept_R[:, None], (given_R[:, None] == ids).float(), log_p_R20.exp())

    def log_p(self, structure: Structure, texts: Sequence[str], draws: Sequence[int], label: int) -> Tensor:
        everything = tuple(range(len(structure.residues)))
        requests = [Request(replace(structure, residues=text), everything) for text in texts]
        # The order of a draw is the same for all sequences.
        letters_R, log_p_R20, _ = self._decoded(requests, [torch.Generator().manual_seed(draw) for draw in draws])
        judged_R = (letters_R < _NUM_LETTERS) & torch.from_numpy(self.designed(structure)).to(self.device).repeat(
            len(texts)
        )
        log_p_R = log_p_R20.gather(-1, letters_R.clamp(max=_NUM_LETTERS - 1)[:, None])[:, 0]
        return log_p_R.masked_fill(~judged_R, torch.nan).view(len(texts), -1)

    def _decoded(self, requests: Sequence[Request], generators: Sequence[torch.Generator]) -> tuple[Tensor, ...]:
        """Return (R,) letters, (R, 20) log-probabilities at temperature 1, and (R,) true for kept residues."""
        # Structures with the same coordinates are encoded once.
        distinct = list({id(request.structure.coordinates): request.structure for request in requests}.values())
        ends = np.cumsum([len(structure.residues) for structure in distinct])
        rows_by_id = {
            id(structure.coordinates): rows
            for structure, rows in zip(distinct, np.split(np.arange(ends[-1]), ends[:-1]), strict=True)
        }
        rows = np.concatenate([rows_by_id[id(request.structure.coordinates)] for request in requests])
        columns: list[tuple[Tensor, ...]] = []
        num_groups = 0
        for request, generator in zip(requests, generators, strict=True):
            groups_L = torch.from_numpy(request.groups)
            length, G = len(groups_L), int(groups_L.max()) + 1
            designed_L = torch.from_numpy(self.designed(request.structure))
            # A group is kept if a residue of it is fixed, or none of them can be designed.
            kept_G = torch.ones(G, dtype=torch.bool)
            kept_G[groups_L[designed_L]] = False
            kept_G[groups_L[list(request.fixed)]] = True
            # Kept residues come first, so that all others see them.
            ranks_L = (torch.rand(G, generator=generator) + ~kept_G)[groups_L]
            uniform = torch.rand(G, _NUM_LETTERS, generator=generator)[groups_L]
            bias = torch.from_numpy(request.bias).expand(length, -1)
            temperature = torch.full((length, 1), request.temperature)
            columns.append((groups_L + num_groups, ranks_L, designed_L, kept_G[groups_L], uniform, bias, temperature))
            num_groups += G
        groups_R, ranks_R, designed_R, kept_R, uniform_R20, bias_R20, temperature_R1 = (
            torch.cat(column).to(self.device) for column in zip(*columns, strict=True)
        )
        # Residues without coordinates do not count in the mean of tied residues.
        sizes_G = torch.bincount(groups_R, designed_R.float()).clamp(min=1)
        text = "".join(request.letters for request in requests)
        letters_R = torch.tensor([LETTERS.find(letter) % len(LETTERS) for letter in text], device=self.device)
        log_p_R20 = torch.empty(len(letters_R), _NUM_LETTERS, device=self.device)

        def choose(rows_M: Tensor, logits_M: Tensor) -> Tensor:
            groups_M = groups_R[rows_M]
            biased = (logits_M[:, :_NUM_LETTERS] + bias_R20[rows_M]).masked_fill(~designed_R[rows_M, None], 0)
            # Tied positions share the mean of their logits, because one residue has to suit all of them.
            sums_G = biased.new_zeros(num_groups, _NUM_LETTERS).index_add_(0, groups_M, biased)
            mean_M = sums_G[groups_M] / sizes_G[groups_M, None]
            log_p_R20[rows_M], drawn_M = drawn_residues(mean_M, temperature_R1[rows_M], uniform_R20[rows_M])
            letters_R[rows_M] = torch.where(kept_R[rows_M], letters_R[rows_M], drawn_M)
            return letters_R[rows_M]

        graph = self._model.graph(structures_batch(distinct).to(self.device))
        decode(self._model, graph, torch.from_numpy(rows).to(self.device), ranks_R, groups_R, choose)
        return letters_R, log_p_R20, kept_R


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
