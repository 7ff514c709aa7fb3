"""Designs and likelihoods of a sequence diffusion model.

Generation starts with <mask> everywhere and decides more positions in each step. A masked diffusion model with the
linear schedule is an autoregressive model in every order at once (Ou et al. 2024). Therefore -log p of a sequence is L
times the mean cross entropy of hidden residues, with the hidden share uniform in (0, 1]. This module uses stratified
shares.

Shape legend: L residues of the structure, T tokens of a batch, C designs of a batch, G groups of tied positions.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.packed_batch import CHAINS, COORDINATES, LABELS, NO_LABEL, NUMBERS, PackedBatch
from esmeray.dataset.structures.store import Structure, chain_positions
from esmeray.dataset.tokens.esm import MASK, pack_sequences
from esmeray.inference.design.sampling import AMINO_ACID_IDS, Request, drawn_residues
from esmeray.tasks.diffusion.data import hidden_share
from esmeray.tasks.diffusion.model import SequenceDiffusion


class Denoiser:
    """Designer by sequence diffusion; see :class:`~esmeray.inference.design.sampling.Designer`."""

    draws = 16
    unsupported: tuple[str, ...] = ()

    def __init__(self, model: SequenceDiffusion) -> None:
        self._model, self.labels, self.device = model, model.labels, next(model.parameters()).device
        self.network: nn.Module = model
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
        batch = structure_batch(structure, texts, label).to(self.device)
        _inside(batch.tokens, len(texts)).masked_fill_(hidden, MASK)
        conditions_TH = self._conditions(structure, len(texts), label)
        logits = amino_acid_logits(self._model, self._model.logits(batch, conditions_TH))
        # Columns of the sequences' residues; -1 for other letters.
        wanted = torch.tensor([[AMINO_ACIDS.find(letter) for letter in text] for text in texts], device=self.device)
        log_p = _inside(logits, len(texts)).log_softmax(-1).gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
        return log_p.masked_fill(~hidden | (wanted < 0), torch.nan)

    def _conditions(self, structure: Structure, copies: int, label: int) -> Tensor:
        """Return the features of copies of a structure, which is encoded once."""
        batch = structure_batch(structure, [structure.residues], label).to(self.device)
        return self._model.conditions(batch).repeat(copies, 1)

    def _denoised(self, request: Request, draws: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        """(C * L,) tokens and (C * L, 20) probabilities, denoised from <mask> everywhere."""
        model, copies, groups_L = self._model, len(draws), torch.from_numpy(request.groups).to(self.device)
        sizes_G = torch.bincount(groups_L)
        batch = structure_batch(request.structure, [request.letters] * copies, request.label).to(self.device)
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
            logits = _inside(amino_acid_logits(model, model.logits(batch, conditions_TH, request.guidance)), copies)
            # Tied positions share the mean of their logits, because one residue has to suit all of them.
            sums = logits.new_zeros(*hidden_CG.shape, len(ids)).index_add_(1, groups_L, logits + bias)
            # Drawn for all groups in each step, so that the numbers don't depend on the device or on earlier decisions.
            # The number 21 keeps a seed's designs as they were: earlier versions drew one more.
            uniform = torch.stack([torch.rand(len(sizes_G), 21, generator=draw) for draw in draws])[..., :20]
            log_p, drawn = drawn_residues(sums / sizes_G[:, None], request.temperature, uniform.to(self.device))
            sure = log_p.gather(-1, drawn[..., None])[..., 0]  # the most confident positions are decided first
            surest = sure.masked_fill(~hidden_CG, -torch.inf).topk(int(hidden_CG[0].sum()) - left, dim=1).indices
            decided = hidden_CG & torch.zeros_like(hidden_CG).scatter_(1, surest, True)
            hidden_CG = hidden_CG & ~decided
            now = decided[:, groups_L]
            rows[now] = ids[drawn[:, groups_L]][now]
            probabilities[now] = log_p.exp()[:, groups_L][now]
        return rows.flatten(), probabilities.flatten(0, 1)


def structure_batch(structure: Structure, sequences: Sequence[str], label: int = NO_LABEL) -> PackedBatch:
    """Pack sequences of the structure's length together with its coordinates."""
    copies = len(sequences)
    # A row before and after the residues for <cls> and <eos>, which have no coordinates.
    coordinates = torch.tensor(structure.coordinates, dtype=torch.float32)
    coordinates_T43 = functional.pad(coordinates, (0, 0, 0, 0, 1, 1), value=torch.nan).repeat(copies, 1, 1)
    by_token = {COORDINATES: coordinates_T43}
    for name, values in ((CHAINS, structure.chains), (NUMBERS, chain_positions(structure.packed_numbers))):
        by_token[name] = functional.pad(torch.from_numpy(values.astype(np.int64)), (1, 1)).repeat(copies)
    return pack_sequences(sequences).adding(by_token, {LABELS: torch.full((copies,), label)})


def amino_acid_logits(model: SequenceDiffusion, logits_TK: Tensor) -> Tensor:
    """(T, 20) logits of the amino acids, independent of the backbone's vocabulary."""
    return logits_TK[:, model.amino_acid_ids]


def _inside(rows: Tensor, copies: int) -> Tensor:
    """(C, L, ...) view of token rows without <cls> and <eos>."""
    return rows.unflatten(0, (copies, -1))[:, 1:-1]
