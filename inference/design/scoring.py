"""How well sequences go with a structure: log-likelihood per residue, and recovery of a native sequence; and how far
they are from known ones, by Smith-Waterman against all of a store.

A masked diffusion model with the linear schedule is an autoregressive model in every order at once (Ou et al. 2024):
-log p of a sequence is L times the mean cross entropy of hidden residues, over a share of them that is uniform in
(0, 1]. Here over stratified shares. Shape legend: L residues, T tokens of a batch, A = 20 amino acids.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esmeray.alignment.search import Search
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.packed_batch import NO_LABEL
from esmeray.dataset.structures.store import Structure
from esmeray.dataset.tokens.esm import MASK
from esmeray.inference.design.sampling import amino_acid_logits, structure_batch
from esmeray.model.forward_loop import ForwardLoop, Indices, consecutive, each
from esmeray.tasks.diffusion.model import SequenceDiffusion
from esmeray.train_config.section import DEFAULT_TOKENS

DRAWS = 16
"""Shares of hidden residues that a likelihood is a mean over."""


def log_likelihoods(
    model: SequenceDiffusion,
    structure: Structure,
    sequences: Sequence[str],
    *,
    label: int = NO_LABEL,
    tokens: int = DEFAULT_TOKENS,
) -> NDArray[np.float64]:
    """(sequences,) mean log-likelihood of a residue, in nats, given the structure. Residues that are no amino acid are
    not judged."""
    length = len(structure.residues)
    at_once = max(1, tokens // (length + 2))
    random = torch.Generator().manual_seed(0)  # the same positions for every sequence, so that scores compare
    order = torch.rand(DRAWS, length, generator=random).argsort(1).argsort(1)
    hidden = order < torch.tensor([[max(1, round(length * (draw + 0.5) / DRAWS))] for draw in range(DRAWS)])
    jobs = [(number, draw) for number in range(len(sequences)) for draw in range(DRAWS)]
    device = next(model.parameters()).device

    @torch.inference_mode()
    def launch(indices: Indices) -> dict[str, Tensor]:
        chunk = [jobs[index] for index in indices.tolist()]
        texts = [sequences[number] for number, _ in chunk]
        batch = structure_batch(structure, texts, label).to(device)
        is_hidden = hidden[[draw for _, draw in chunk]].to(device)
        batch.tokens.view(len(chunk), length + 2)[:, 1:-1].masked_fill_(is_hidden, MASK)
        logits = amino_acid_logits(model, model.logits(batch, model.conditions(batch)))
        log_p = logits.view(len(chunk), length + 2, 20)[:, 1:-1].log_softmax(-1)
        wanted = torch.tensor([[AMINO_ACIDS.find(letter) for letter in text] for text in texts], device=device)
        judged = is_hidden & (wanted >= 0)
        chosen = log_p.gather(-1, wanted.clamp(min=0)[..., None])[..., 0].masked_fill(~judged, 0)
        return {"sums": chosen.sum(1), "counts": judged.sum(1)}

    loop = ForwardLoop(device, each(launch), lambda index: f"sequence {jobs[index][0] + 1} of {length:,} residues")
    sums, counts = np.zeros((len(sequences), DRAWS)), np.zeros((len(sequences), DRAWS))
    for indices, totals in loop.run(consecutive(len(jobs), at_once)):
        sums.flat[indices] = totals["sums"].numpy()
        counts.flat[indices] = totals["counts"].numpy()
    known = counts > 0  # of a short sequence a draw may hide residues alone that are not judged
    return np.where(known, sums / np.maximum(counts, 1), 0).sum(1) / known.sum(1)


def recovery(designed: str, native: str) -> float:
    """Share of positions with the native residue, of those whose native residue is an amino acid."""
    judged = [(letter, other) for letter, other in zip(designed, native, strict=True) if other in AMINO_ACIDS]
    return sum(letter == other for letter, other in judged) / max(1, len(judged))


def nearest(residues: str, known: Search) -> tuple[str, float]:
    """The id of the sequence of a store that has the highest score, and the share of the residues that differ from it,
    where they are not aligned included."""
    query = residues.encode()
    hits = known.hits(query, count=1, evalue=float("inf"))
    if not hits:  # nothing scores above 0: all of it is new, whatever the record
        return known.store.id(0), 1.0
    target = known.store.text(hits[0].record)
    pairs = known.alignment(query, hits[0]).tolist()
    matches = sum(residues[q] == target[t] for q, t in pairs if q >= 0 and t >= 0)
    return known.store.id(hits[0].record), 1 - matches / len(residues)
