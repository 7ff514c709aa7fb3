"""Designs and likelihoods of ProteinMPNN, which draws one residue after the other, in a random order per design.

Structures and designs of a batch are packed without padding. A structure is encoded once for all its designs. In each
step, all residues whose earlier neighbours are decided are drawn at once.

Residues without coordinates keep the structure's letter, unless they are tied to others, and are not scored.

Shape legend: T residues of the structures, R residues of all designs, M residues of a step, G groups of tied positions.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esmeray.dataset.structures.store import Structure
from esmeray.dataset.tokens.esm import VOCABULARY, encode
from esmeray.inference.design.sampling import AMINO_ACID_IDS, Request, gumbel, structure_batch
from esmeray.model.structures.proteinmpnn import LETTERS, ProteinMPNN, decode

_X = LETTERS.index("X")
_LETTERS = torch.tensor([LETTERS.index(token) if token in LETTERS else _X for token in VOCABULARY])
"""ProteinMPNN's index of each token of VOCABULARY."""


class AutoregressiveDesigner:
    """Designer by ProteinMPNN; see :class:`~esmeray.inference.design.sampling.Designer`."""

    labels: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = "length", "steps", "guidance"
    draws = 4

    def __init__(self, model: ProteinMPNN, weights: str) -> None:
        self.network, self.weights, self.device = model, weights, model.W_e.weight.device

    def designed(self, structure: Structure) -> NDArray[np.bool_]:
        return self.network.known(torch.from_numpy(structure.coordinates)).numpy()

    def designs(self, requests: Sequence[Request], generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        tokens_R, log_p_R20, kept_R = self._decoded(requests, generators)
        given_R20 = (tokens_R[:, None] == AMINO_ACID_IDS.to(self.device)).float()
        return tokens_R, torch.where(kept_R[:, None], given_R20, log_p_R20.exp())

    def log_p(self, structure: Structure, texts: Sequence[str], draws: Sequence[int], label: int) -> Tensor:
        everything = tuple(range(len(structure.residues)))
        requests = [Request(replace(structure, residues=text), everything) for text in texts]
        # The order of a draw is the same for all sequences.
        _, log_p_R20, _ = self._decoded(requests, [torch.Generator().manual_seed(draw) for draw in draws])
        return log_p_R20.unflatten(0, (len(texts), -1))

    def _decoded(self, requests: Sequence[Request], generators: Sequence[torch.Generator]) -> tuple[Tensor, ...]:
        """Return (R,) ids of VOCABULARY, (R, 20) log-probabilities at temperature 1, and (R,) true for kept residues.

        The log-probabilities are NaN for residues without coordinates that are not tied to others.
        """
        # Structures with the same coordinates are encoded once.
        distinct = {id(request.structure.coordinates): request.structure for request in requests}
        batch = structure_batch([*distinct.values()])
        starts = dict(zip(distinct, (batch.cu_seqlens + 1).tolist(), strict=False))
        columns: list[tuple[Tensor, ...]] = []
        num_groups = 0
        for request, generator in zip(requests, generators, strict=True):
            groups_L, bias = torch.from_numpy(request.groups), torch.from_numpy(request.bias)
            length, G = len(groups_L), int(groups_L.max()) + 1
            rows_L = starts[id(request.structure.coordinates)] + torch.arange(length)
            tokens_L = torch.from_numpy(encode(request.letters)[1:-1])
            designed_L = torch.from_numpy(self.designed(request.structure))
            # A group is kept if a residue of it is fixed, or none of them can be designed.
            kept_G = torch.ones(G, dtype=torch.bool)
            kept_G[groups_L[designed_L]] = False
            kept_G[groups_L[list(request.fixed)]] = True
            # Kept residues come first, so that all others see them.
            ranks_G = torch.rand(G, generator=generator) + ~kept_G
            noise_G20 = request.temperature * gumbel(torch.rand(G, len(AMINO_ACID_IDS), generator=generator))
            by_group = [values[groups_L] for values in (kept_G, ranks_G, noise_G20)]
            columns.append((rows_L, tokens_L, designed_L, groups_L + num_groups, bias.expand(length, -1), *by_group))
            num_groups += G
        rows_R, tokens_R, designed_R, groups_R, bias_R20, kept_R, ranks_R, noise_R20 = (
            torch.cat(column).to(self.device) for column in zip(*columns, strict=True)
        )
        # Residues without coordinates do not count in the mean of tied residues.
        sizes_G = torch.bincount(groups_R, designed_R.float())
        log_p_R20 = torch.empty_like(noise_R20)
        ids, letters = AMINO_ACID_IDS.to(self.device), _LETTERS.to(self.device)

        def choose(rows_M: Tensor, logits_M21: Tensor) -> Tensor:
            groups_M = groups_R[rows_M]
            biased = (logits_M21[:, :_X] + bias_R20[rows_M]).masked_fill(~designed_R[rows_M, None], 0)
            # Tied positions share the mean of their logits, because one residue has to suit all of them.
            sums_G = biased.new_zeros(num_groups, _X).index_add_(0, groups_M, biased)
            log_p_R20[rows_M] = (sums_G[groups_M] / sizes_G[groups_M, None]).log_softmax(-1)
            drawn_M = ids[(log_p_R20[rows_M] + noise_R20[rows_M]).argmax(-1)]
            tokens_R[rows_M] = torch.where(kept_R[rows_M], tokens_R[rows_M], drawn_M)
            return letters[tokens_R[rows_M]]

        decode(self.network, self.network.graph(batch.to(self.device)), rows_R, ranks_R, groups_R, choose)
        return tokens_R, log_p_R20, kept_R
