"""Sequences for a structure, by denoising: from <mask> everywhere, some positions more are decided in each step.

In: a trained model and what is asked for. Out: sequences with the probabilities of each position when it was decided.
A design depends on its own seed alone, not on what it shares a batch with.

Shape legend: L residues of the structure, T tokens of a batch, A = 20 amino acids, G groups of tied positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataset.fasta.alphabet import AMINO_ACIDS
from dataset.packed_batch import NO_LABEL, PackedBatch
from dataset.structures.store import Structure
from dataset.tokens.esm import MASK, VOCABULARY, pack_sequences
from model.tasks.diffusion import SequenceDiffusion

_AMINO_ACID_IDS = torch.tensor([VOCABULARY.index(letter) for letter in AMINO_ACIDS])


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        structure: backbone; residues without coordinates are designed from the others.
        fixed: positions from 0 that keep the structure's residue.
        omitted: letters that are not to be used.
        tied: groups of positions that get the same residue.
        label: number of the class, :data:`~dataset.packed_batch.NO_LABEL` for none.
        temperature: of sampling; 0 takes the likeliest residue.
        steps: evaluations of the model.
        guidance: see :meth:`~model.tasks.diffusion.SequenceDiffusion.logits`.
        order: which positions are decided first: those that the model is surest of, or any.
    """

    structure: Structure
    fixed: tuple[int, ...] = ()
    omitted: str = ""
    tied: tuple[tuple[int, ...], ...] = ()
    label: int = NO_LABEL
    temperature: float = 0.1
    steps: int = 20
    guidance: float = 1.0
    order: Literal["confidence", "random"] = "confidence"


@dataclass(frozen=True)
class Design:
    """A generated sequence.

    Attributes:
        residues: L letters.
        probabilities: (L, 20) of the amino acids in the order of
            :data:`~dataset.fasta.alphabet.AMINO_ACIDS`, when the position was decided; 1 for a fixed residue.
        seed: number of the design.
    """

    residues: str
    probabilities: NDArray[np.float32]
    seed: int


@torch.inference_mode()
def generate(
    model: SequenceDiffusion,
    request: Request,
    number: int,
    *,
    seed: int = 0,
    batch_tokens: int = 8192,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Design]:
    """Designs ``0`` to ``number - 1`` of a seed, as batches of them are done."""
    length = len(request.structure.residues)
    at_once = max(1, batch_tokens // (length + 2))
    for start in range(0, number, at_once):
        seeds = range(start, min(start + at_once, number))
        yield from _denoised(model, request, seed, seeds)
        if progress is not None:
            progress(seeds.stop)


def structure_batch(structure: Structure, sequences: list[str], label: int = NO_LABEL) -> PackedBatch:
    """Sequences of a structure, of its length each, packed with its coordinates."""
    from dataclasses import replace

    batch = pack_sequences(sequences)
    copies, length = len(sequences), len(structure.residues)
    coordinates = torch.full((copies, length + 2, 4, 3), torch.nan)
    coordinates[:, 1:-1] = torch.from_numpy(structure.coordinates)
    chains = torch.zeros(copies, length + 2, dtype=torch.int64)
    chains[:, 1:-1] = torch.from_numpy(structure.chains.astype(np.int64))
    labels = torch.full((copies,), label)
    return replace(batch, coordinates=coordinates.flatten(0, 1), chains=chains.flatten(), labels=labels)


def amino_acid_logits(model: SequenceDiffusion, logits_TK: Tensor) -> Tensor:
    """(T, 20): the logits of the amino acids alone, whatever the backbone's vocabulary."""
    ids = _AMINO_ACID_IDS.to(logits_TK.device)
    if model.backbone.residue_ids is not None:
        ids = model.backbone.residue_ids[ids]
    return logits_TK[:, ids]


def _denoised(model: SequenceDiffusion, request: Request, seed: int, seeds: range) -> Iterator[Design]:
    structure, copies = request.structure, len(seeds)
    length, device = len(structure.residues), next(model.parameters()).device
    batch = structure_batch(structure, [structure.residues.replace("-", "X")] * copies, request.label).to(device)
    conditions_TH = model.conditions(batch)
    groups_L, num_groups = _groups(request, length)
    groups_L = groups_L.to(device)
    hidden = torch.ones(copies, num_groups, dtype=torch.bool, device=device)
    hidden[:, groups_L[list(request.fixed)]] = False
    rows = batch.tokens.view(copies, length + 2)[:, 1:-1]  # a view: what is decided is seen by the next step
    rows.masked_fill_(hidden[:, groups_L], MASK)
    probabilities = torch.nn.functional.one_hot(_indices(structure.residues), 20).float().to(device)
    probabilities = probabilities.repeat(copies, 1, 1)
    allowed = torch.tensor([letter not in request.omitted for letter in AMINO_ACIDS], device=device)
    noise = [torch.Generator().manual_seed(_stream(seed, number)) for number in seeds]
    num_hidden = int(hidden[0].sum())
    sizes_G = torch.bincount(groups_L, minlength=num_groups).clamp(min=1)
    for step in range(request.steps):
        left = round(num_hidden * _hidden_share(model.section.schedule, 1 - (step + 1) / request.steps))
        logits = amino_acid_logits(model, model.logits(batch, conditions_TH, request.guidance))
        logits = logits.view(copies, length + 2, 20)[:, 1:-1].masked_fill(~allowed, -torch.inf)
        grouped = torch.zeros(copies, num_groups, 20, device=device).index_add_(1, groups_L, logits)
        grouped = (grouped / sizes_G[:, None]).masked_fill(~allowed, -torch.inf)
        log_p = grouped.log_softmax(-1)
        uniform = torch.stack([torch.rand(num_groups, 21, generator=each) for each in noise]).to(device)
        gumbel = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
        drawn = (log_p + request.temperature * gumbel[..., :20]).argmax(-1)
        sure = log_p.gather(-1, drawn[..., None])[..., 0]
        if request.order == "random":
            sure = uniform[..., 20]
        decided = hidden & _surest(sure.masked_fill(~hidden, -torch.inf), int(hidden[0].sum()) - left)
        hidden &= ~decided
        now = decided[:, groups_L]
        rows[now] = _AMINO_ACID_IDS.to(device)[drawn[:, groups_L]][now]
        probabilities[now] = log_p.exp()[:, groups_L][now]
    for place, number in enumerate(seeds):
        letters = "".join(VOCABULARY[token] for token in rows[place].tolist())
        yield Design(letters, probabilities[place].cpu().numpy(), number)


def _groups(request: Request, length: int) -> tuple[Tensor, int]:
    """(L,) group of each position, a group of its own where it is not tied, and their number."""
    group_of = list(range(length))
    for tied in request.tied:
        for place in tied:
            group_of[place] = group_of[tied[0]]
    _, numbers = np.unique(group_of, return_inverse=True)
    return torch.from_numpy(numbers), int(numbers.max()) + 1


def _surest(values: Tensor, number: int) -> Tensor:
    """(copies, G) bool: the ``number`` highest of each row."""
    chosen = torch.zeros_like(values, dtype=torch.bool)
    if number > 0:
        chosen.scatter_(1, values.topk(number, dim=1).indices, True)
    return chosen


def _indices(residues: str) -> Tensor:
    """(L,) number of each amino acid; 0 for others, which are never fixed."""
    return torch.tensor([max(0, AMINO_ACIDS.find(letter)) for letter in residues])


def _hidden_share(schedule: str, time: float) -> float:
    return time if schedule == "linear" else 1 - math.cos(time * math.pi / 2)


def _stream(seed: int, number: int) -> int:
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1)
