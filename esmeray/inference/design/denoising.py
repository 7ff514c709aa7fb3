"""Designs and likelihoods of a sequence diffusion model.

Generation starts with <mask> everywhere and decides more positions in each step. A masked diffusion model with the
linear schedule is an autoregressive model in every order at once (Ou et al. 2024). Therefore -log p of a sequence is L
times the mean cross entropy of hidden residues, with the hidden share uniform in (0, 1]. This module uses stratified
shares.

Shape legend: L residues of the structure, T tokens of a batch, C designs of a batch, G groups of tied positions.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esmeray.dataset.structures.store import Structure
from esmeray.dataset.tokens.esm import MASK
from esmeray.inference.design.sampling import AMINO_ACID_IDS, Request, gumbel, structure_batch
from esmeray.tasks.diffusion.data import hidden_share
from esmeray.tasks.diffusion.model import SequenceDiffusion


class Denoiser:
    """Designer by sequence diffusion; see :class:`~esmeray.inference.design.sampling.Designer`."""

    draws = 16
    unsupported: tuple[str, ...] = ()

    def __init__(self, model: SequenceDiffusion) -> None:
        self.network, self.labels, self.device = model, model.labels, next(model.parameters()).device
        weights = model.encoder_weights
        self.weights = "" if weights is None else weights.title

    def designed(self, structure: Structure) -> NDArray[np.bool_]:
        # Residues without coordinates are designed from the others.
        return np.ones(len(structure.residues), dtype=bool)

    def designs(self, requests: Sequence[Request], generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        parts = []
        # Designs of one request are denoised together.
        for _, group in groupby(zip(requests, generators, strict=True), key=lambda pair: id(pair[0])):
            same, draws = zip(*group, strict=True)
            parts.append(self._denoised(same[0], draws))
        tokens, probabilities = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(probabilities)

    def log_p(self, structure: Structure, texts: Sequence[str], draws: Sequence[int], label: int) -> Tensor:
        # Each draw hides one residue or more.
        length = len(structure.residues)
        generator = torch.Generator().manual_seed(0)
        ranks = torch.rand(self.draws, length, generator=generator).argsort(1).argsort(1)
        numbers_hidden = [max(1, round(length * (draw + 0.5) / self.draws)) for draw in range(self.draws)]
        hidden = (ranks < torch.tensor(numbers_hidden)[:, None])[list(draws)].to(self.device)
        batch = structure_batch([replace(structure, residues=text) for text in texts], label).to(self.device)
        _inside(batch.tokens, len(texts)).masked_fill_(hidden, MASK)
        conditions_TH = self._conditions(structure, len(texts), label)
        logits_T20 = self.network.logits(batch, conditions_TH)[:, self.network.amino_acid_ids]
        return _inside(logits_T20, len(texts)).log_softmax(-1).masked_fill(~hidden[..., None], torch.nan)

    def _conditions(self, structure: Structure, copies: int, label: int) -> Tensor:
        """Return the features of copies of a structure, which is encoded once."""
        return self.network.conditions(structure_batch([structure], label).to(self.device)).repeat(copies, 1)

    def _denoised(self, request: Request, draws: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        """(C * L,) tokens and (C * L, 20) probabilities, denoised from <mask> everywhere."""
        model, copies, groups_L = self.network, len(draws), torch.from_numpy(request.groups).to(self.device)
        sizes_G = torch.bincount(groups_L)
        draft = replace(request.structure, residues=request.letters)
        batch = structure_batch([draft] * copies, request.label).to(self.device)
        conditions_TH = self._conditions(request.structure, copies, request.label)
        bias = torch.from_numpy(request.bias).to(self.device)
        hidden_CG = torch.ones(copies, len(sizes_G), dtype=torch.bool, device=self.device)
        hidden_CG[:, groups_L[list(request.fixed)]] = False
        ids = AMINO_ACID_IDS.to(self.device)
        rows = _inside(batch.tokens, copies)  # a view, so that the next step sees decided residues
        rows.masked_fill_(hidden_CG[:, groups_L], MASK)
        probabilities = (rows[..., None] == ids).float()  # 1 for fixed residues
        num_hidden = int(hidden_CG[0].sum())
        for step in range(request.steps):
            # The hidden share follows training's schedule, so that the model sees shares that it was trained on.
            share = float(hidden_share(np.float64(1 - (step + 1) / request.steps), model.section.schedule))
            left = round(num_hidden * share)
            logits_TK = model.logits(batch, conditions_TH, request.guidance)
            logits = _inside(logits_TK[:, model.amino_acid_ids], copies)
            # Tied positions share the mean of their logits, because one residue has to suit all of them.
            sums = logits.new_zeros(*hidden_CG.shape, len(ids)).index_add_(1, groups_L, logits + bias)
            # Drawn for all groups in each step, so that the numbers don't depend on the device or on earlier decisions.
            # The number 21 keeps a seed's designs as they were: earlier versions drew one more.
            uniform = torch.stack([torch.rand(len(sizes_G), 21, generator=draw) for draw in draws])[..., :20]
            log_p = (sums / sizes_G[:, None]).log_softmax(-1)
            drawn = (log_p + request.temperature * gumbel(uniform).to(self.device)).argmax(-1)
            sure = log_p.gather(-1, drawn[..., None])[..., 0]  # the most confident positions are decided first
            surest = sure.masked_fill(~hidden_CG, -torch.inf).topk(int(hidden_CG[0].sum()) - left, dim=1).indices
            decided = hidden_CG & torch.zeros_like(hidden_CG).scatter_(1, surest, True)
            hidden_CG = hidden_CG & ~decided
            now = decided[:, groups_L]
            rows[now] = ids[drawn[:, groups_L]][now]
            probabilities[now] = log_p.exp()[:, groups_L][now]
        return rows.flatten(), probabilities.flatten(0, 1)


def _inside(rows: Tensor, copies: int) -> Tensor:
    """(C, L, ...) view of token rows without <cls> and <eos>."""
    return rows.unflatten(0, (copies, -1))[:, 1:-1]
