"""Generate sequences for a structure by denoising, and score given sequences.

Generation starts with <mask> everywhere and decides more positions in each step. Scores are the log-likelihood per
residue, the recovery of a native sequence, and the novelty compared with known sequences.

A design depends on its own seed only, not on its batch. A masked diffusion model with the linear schedule is an
autoregressive model in every order at once (Ou et al. 2024). Therefore -log p of a sequence is L times the mean cross
entropy of hidden residues, with the hidden share uniform in (0, 1]. This module uses stratified shares.

Shape legend: L residues of the structure, T tokens of a batch, A = 20 amino acids, G groups of tied positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from esmeray.alignment.search import Search
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.packed_batch import CHAINS, COORDINATES, LABELS, NO_LABEL, PackedBatch
from esmeray.dataset.structures.store import Structure
from esmeray.dataset.tokens.esm import MASK, VOCABULARY, pack_sequences
from esmeray.model.forward_loop import ForwardLoop, Indices, consecutive, one_by_one
from esmeray.tasks.diffusion.data import hidden_share
from esmeray.tasks.diffusion.model import SequenceDiffusion
from esmeray.train_config.section import DEFAULT_TOKENS

_AMINO_ACID_IDS = torch.tensor([VOCABULARY.index(letter) for letter in AMINO_ACIDS])


@dataclass(frozen=True)
class Request:
    """Request for designs on one structure.

    Attributes:
        structure: backbone; residues without coordinates are designed from the others.
        fixed: positions from 0 that keep the structure's residue.
        omitted: letters to exclude.
        tied: groups of positions that get the same residue.
        label: class number, or :data:`~esmeray.dataset.packed_batch.NO_LABEL`.
        temperature: sampling temperature; 0 takes the likeliest residue.
        steps: number of evaluations of the model.
        guidance: see :meth:`~esmeray.tasks.diffusion.model.SequenceDiffusion.logits`.
    """

    structure: Structure
    fixed: tuple[int, ...] = ()
    omitted: str = ""
    tied: tuple[tuple[int, ...], ...] = ()
    label: int = NO_LABEL
    temperature: float = 0.1
    steps: int = 20
    guidance: float = 1.0


@dataclass(frozen=True)
class Design:
    """A generated sequence of L letters, its seed number and its probabilities.

    ``probabilities`` is (L, 20) over :data:`~esmeray.dataset.fasta.alphabet.AMINO_ACIDS`, at the step that decided the
    position; 1 for a fixed residue.
    """

    residues: str
    probabilities: NDArray[np.float32]
    seed: int


def generate(
    model: SequenceDiffusion,
    request: Request,
    number: int,
    *,
    seed: int = 0,
    tokens: int = DEFAULT_TOKENS,
) -> Iterator[Design]:
    """Yield designs ``0`` to ``number - 1`` of a seed, batch by batch."""
    length = len(request.structure.residues)
    device = next(model.parameters()).device

    @torch.inference_mode()
    def launch(numbers: Indices) -> dict[str, Tensor]:
        tokens, probabilities = _denoised(_Drafts(model, request, seed, numbers.tolist()))
        return {"tokens": tokens, "probabilities": probabilities}

    loop = ForwardLoop(device, one_by_one(launch), lambda index: f"design {index} of {length:,} residues")
    for numbers, designs in loop.run(consecutive(number, max(1, tokens // (length + 2)))):
        rows = zip(numbers.tolist(), designs["tokens"].tolist(), designs["probabilities"].numpy(), strict=True)
        for number_of_design, row, probabilities in rows:
            yield Design("".join(VOCABULARY[token] for token in row), probabilities, number_of_design)


def structure_batch(structure: Structure, sequences: list[str], label: int = NO_LABEL) -> PackedBatch:
    """Pack sequences of the structure's length together with its coordinates."""
    copies = len(sequences)
    # A row before and after the residues for <cls> and <eos>, which have no coordinates.
    coordinates = torch.tensor(structure.coordinates, dtype=torch.float32)
    coordinates_T43 = functional.pad(coordinates, (0, 0, 0, 0, 1, 1), value=torch.nan).repeat(copies, 1, 1)
    chains_T = functional.pad(torch.from_numpy(structure.chains.astype(np.int64)), (1, 1)).repeat(copies)
    return pack_sequences(sequences).adding(
        {COORDINATES: coordinates_T43, CHAINS: chains_T}, {LABELS: torch.full((copies,), label)}
    )


def amino_acid_logits(model: SequenceDiffusion, logits_TK: Tensor) -> Tensor:
    """(T, 20) logits of the amino acids, independent of the backbone's vocabulary."""
    ids = _AMINO_ACID_IDS.to(logits_TK.device)
    backbone_ids = model.backbone.residue_ids
    return logits_TK[:, ids if backbone_ids is None else backbone_ids[ids]]


class _Drafts:
    """State of (copies) unfinished designs.

    It holds the batch, the (T, H) conditions, the (L,) group of each position, the (copies, G) hidden mask, and a
    random generator per design.
    """

    def __init__(self, model: SequenceDiffusion, request: Request, seed: int, numbers: list[int]) -> None:
        self.model, self.request, device = model, request, next(model.parameters()).device
        groups_L, num_groups = _groups(request, len(request.structure.residues))
        letters = np.array(list(request.structure.residues))
        # Positions tied to a fixed position get its residue.
        for position in request.fixed:
            letters[groups_L == groups_L[position]] = letters[position]
        self.batch: PackedBatch = structure_batch(
            request.structure, ["".join(letters)] * len(numbers), request.label
        ).to(device)
        self.conditions, self.groups = model.conditions(self.batch), groups_L.to(device)
        self.hidden = torch.ones(len(numbers), num_groups, dtype=torch.bool, device=device)
        self.hidden[:, groups_L[list(request.fixed)]] = False
        # One generator per design, seeded by its number, so that a design does not depend on its batch.
        states = [np.random.SeedSequence([seed, number]).generate_state(1, np.uint64) for number in numbers]
        self.draws = [torch.Generator().manual_seed(int(state[0] >> 1)) for state in states]

    def inside(self, rows: Tensor) -> Tensor:
        """(copies, L, ...) view of token rows without <cls> and <eos>."""
        return rows.unflatten(0, (len(self.draws), -1))[:, 1:-1]

    def drawn(self, logits_T20: Tensor) -> tuple[Tensor, Tensor]:
        """Return (copies, G, 20) log-probabilities and (copies, G) sampled amino acids."""
        copies, G = self.hidden.shape
        # Tied positions share the mean of their logits, because one residue has to suit all of them.
        allowed = torch.tensor([letter not in self.request.omitted for letter in AMINO_ACIDS], device=logits_T20.device)
        sums = torch.zeros(copies, G, 20, device=logits_T20.device).index_add_(1, self.groups, self.inside(logits_T20))
        sizes_G = torch.bincount(self.groups, minlength=G).clamp(min=1)
        log_p = (sums / sizes_G[:, None]).masked_fill(~allowed, -torch.inf).log_softmax(-1)
        # Sampled on the CPU for all groups in each step, so that the numbers don't depend on the device or on earlier
        # decisions. The number 21 keeps a seed's designs as they were: earlier versions drew one more.
        uniform = torch.stack([torch.rand(G, 21, generator=draw) for draw in self.draws]).to(logits_T20.device)
        # Gumbel-max trick: argmax of log p + T g samples at temperature T, and takes the likeliest at 0. Clamped,
        # because 0 and 1 have no finite logarithm.
        gumbel = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
        return log_p, (log_p + self.request.temperature * gumbel[..., :20]).argmax(-1)


def _denoised(drafts: _Drafts) -> tuple[Tensor, Tensor]:
    """(copies, L) tokens and (copies, L, 20) probabilities, denoised from <mask> everywhere."""
    model, request, hidden, groups_L = drafts.model, drafts.request, drafts.hidden, drafts.groups
    rows = drafts.inside(drafts.batch.tokens)  # a view, so that the next step sees decided residues
    rows.masked_fill_(hidden[:, groups_L], MASK)
    probabilities = (rows[..., None] == _AMINO_ACID_IDS.to(rows.device)).float()  # 1 for fixed residues
    num_hidden = int(hidden[0].sum())
    for step in range(request.steps):
        # The hidden share follows training's schedule, so that the model sees shares that it was trained on.
        left = round(
            num_hidden * float(hidden_share(np.float64(1 - (step + 1) / request.steps), model.section.schedule))
        )
        logits_TK = model.logits(drafts.batch, drafts.conditions, request.guidance)
        log_p, drawn = drafts.drawn(amino_acid_logits(model, logits_TK))
        sure = log_p.gather(-1, drawn[..., None])[..., 0]  # the most confident positions are decided first
        surest = sure.masked_fill(~hidden, -torch.inf).topk(int(hidden[0].sum()) - left, dim=1).indices
        decided = hidden & torch.zeros_like(hidden).scatter_(1, surest, True)
        hidden = hidden & ~decided
        now = decided[:, groups_L]
        rows[now] = _AMINO_ACID_IDS.to(rows.device)[drawn[:, groups_L]][now]
        probabilities[now] = log_p.exp()[:, groups_L][now]
    return rows, probabilities


def _groups(request: Request, length: int) -> tuple[Tensor, int]:
    """(L,) group of each position and the number of groups. A position that is not tied has its own group."""
    group_of = np.arange(length)
    for tied in request.tied:
        group_of[list(tied)] = group_of[tied[0]]
    _, numbers = np.unique(group_of, return_inverse=True)
    return torch.from_numpy(numbers), int(numbers.max()) + 1


DRAWS = 16
"""Number of hidden shares that a likelihood averages over."""


def log_likelihoods(
    model: SequenceDiffusion,
    structure: Structure,
    sequences: Sequence[str],
    *,
    label: int = NO_LABEL,
    tokens: int = DEFAULT_TOKENS,
) -> NDArray[np.float64]:
    """(sequences,) mean log-likelihood per residue, in nats, given the structure.

    Residues other than the 20 amino acids are ignored.
    """
    length = len(structure.residues)
    at_once = max(1, tokens // (length + 2))
    # Each draw hides one residue or more. All sequences use the same positions, so that their scores are comparable.
    generator = torch.Generator().manual_seed(0)
    ranks = torch.rand(DRAWS, length, generator=generator).argsort(1).argsort(1)
    numbers_hidden = [max(1, round(length * (draw + 0.5) / DRAWS)) for draw in range(DRAWS)]
    hidden = ranks < torch.tensor(numbers_hidden)[:, None]
    device = next(model.parameters()).device

    # Indices are of pairs of a sequence and a draw, with the draws of a sequence next to each other.
    @torch.inference_mode()
    def launch(indices: Indices) -> dict[str, Tensor]:
        rows, draws = np.divmod(indices, DRAWS)
        texts = [sequences[row] for row in rows.tolist()]
        batch = structure_batch(structure, texts, label).to(device)
        is_hidden = hidden[draws.tolist()].to(device)
        batch.tokens.view(len(texts), length + 2)[:, 1:-1].masked_fill_(is_hidden, MASK)
        logits = amino_acid_logits(model, model.logits(batch, model.conditions(batch)))
        log_p = logits.view(len(texts), length + 2, 20)[:, 1:-1].log_softmax(-1)
        # Columns of the sequences' residues; -1 for other letters.
        wanted = torch.tensor([[AMINO_ACIDS.find(letter) for letter in text] for text in texts], device=device)
        judged = is_hidden & (wanted >= 0)
        chosen = log_p.gather(-1, wanted.clamp(min=0)[..., None])[..., 0].masked_fill(~judged, 0)
        return {"sums": chosen.sum(1), "counts": judged.sum(1)}

    loop = ForwardLoop(
        device, one_by_one(launch), lambda index: f"sequence {index // DRAWS + 1} of {length:,} residues"
    )
    sums, counts = np.zeros((len(sequences), DRAWS)), np.zeros((len(sequences), DRAWS))
    for indices, totals in loop.run(consecutive(sums.size, at_once)):
        sums.flat[indices] = totals["sums"].numpy()
        counts.flat[indices] = totals["counts"].numpy()
    known = counts > 0  # in a short sequence, all hidden residues of a draw may be non-standard
    return np.where(known, sums / np.maximum(counts, 1), 0).sum(1) / known.sum(1)


def recovery(designed: str, native: str) -> float:
    """Share of positions with the native residue, among positions whose native residue is an amino acid."""
    judged = [(letter, other) for letter, other in zip(designed, native, strict=True) if other in AMINO_ACIDS]
    return sum(letter == other for letter, other in judged) / max(1, len(judged))


def nearest(residues: str, known: Search) -> tuple[float, str]:
    """Return the share of residues that differ from the best-scoring sequence of the store, and its id.

    Unaligned residues count as different.
    """
    query = residues.encode()
    hits = known.hits(query, count=1, evalue=float("inf"))
    if not hits:  # nothing scores above 0: all residues are new, compared with any record
        return 1.0, known.store.id(0)
    target = known.store.text(hits[0].record)
    matches = sum(residues[q] == target[t] for q, t in known.alignment(query, hits[0]).tolist() if q >= 0 and t >= 0)
    return 1 - matches / len(residues), known.store.id(hits[0].record)
