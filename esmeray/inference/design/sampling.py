"""Generate sequences for structures, and score given sequences, with any model that designs.

Scores are the log-likelihood per residue, the recovery of a native sequence, and the novelty compared with known
sequences. A design depends on its own seed only, not on its batch.

Shape legend: L residues of a structure, R residues of all designs of a batch, C designs of a batch, A = 20 amino acids.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esmeray.alignment.search import Search
from esmeray.common.errors import DataError
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.packed_batch import CHAINS, COORDINATES, LABELS, NO_LABEL, NUMBERS, PackedBatch
from esmeray.dataset.structures.store import Structure, chain_positions
from esmeray.dataset.tokens.esm import VOCABULARY, pack_sequences
from esmeray.model.forward_loop import ForwardLoop, Indices, consecutive, one_by_one
from esmeray.train_config.section import DEFAULT_TOKENS

AMINO_ACID_IDS = torch.tensor([VOCABULARY.index(letter) for letter in AMINO_ACIDS])


@dataclass(frozen=True)
class Request:
    """Request for designs on one structure.

    Attributes:
        structure: backbone.
        fixed: positions from 0 that keep the structure's residue.
        bias: added to the logits before the temperature, (L, 20) or (20,); -inf excludes a letter.
        tied: groups of positions that get the same residue.
        label: class number, or :data:`~esmeray.dataset.packed_batch.NO_LABEL`.
        temperature: sampling temperature; 0 takes the likeliest residue.
        steps: number of evaluations of a diffusion model.
        guidance: see :meth:`~esmeray.tasks.diffusion.model.SequenceDiffusion.logits`.
    """

    structure: Structure
    fixed: tuple[int, ...] = ()
    bias: NDArray[np.float32] = field(default_factory=lambda: np.zeros(len(AMINO_ACIDS), np.float32))
    tied: tuple[tuple[int, ...], ...] = ()
    label: int = NO_LABEL
    temperature: float = 0.1
    steps: int = 20
    guidance: float = 1.0

    @property
    def groups(self) -> NDArray[np.int64]:
        """(L,) number of each position's group. A position that is not tied has its own group."""
        group_of = np.arange(len(self.structure.residues))
        for tied in self.tied:
            group_of[list(tied)] = group_of[tied[0]]
        return np.unique(group_of, return_inverse=True)[1]

    @property
    def letters(self) -> str:
        """The structure's residues, in which positions tied to a fixed position have its residue."""
        letters, groups_L = np.array(list(self.structure.residues)), self.groups
        for position in self.fixed:
            letters[groups_L == groups_L[position]] = letters[position]
        return "".join(letters)


@dataclass(frozen=True)
class Design:
    """A generated sequence of L letters, its seed number and its probabilities.

    ``probabilities`` is (L, 20) over :data:`~esmeray.dataset.fasta.alphabet.AMINO_ACIDS`, at the step that decided the
    position; 1 for a fixed residue.
    """

    residues: str
    probabilities: NDArray[np.float32]
    seed: int


class Designer(Protocol):
    """A model that designs sequences for structures, on its device.

    Attributes:
        weights: name and license of published weights; empty for a model trained here.
        labels: classes that a design can be conditioned on.
        unsupported: names of settings that the model does not have.
        draws: number of random draws that a likelihood averages over.
        network: the model itself.
    """

    weights: str
    labels: tuple[str, ...]
    unsupported: tuple[str, ...]
    draws: int
    device: torch.device

    @property
    def network(self) -> nn.Module: ...

    def designed(self, structure: Structure) -> NDArray[np.bool_]:
        """Return (L,) bool, true for positions that the model can design; the others keep their residue."""

    def designs(self, requests: Sequence[Request], generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        """Return (R,) ids of VOCABULARY and (R, 20) probabilities of a design per request, with its own generator."""

    def log_p(self, structure: Structure, texts: Sequence[str], draws: Sequence[int], label: int) -> Tensor:
        """Return (C, L, 20) log-probabilities for each text in a numbered random draw; NaN at residues not judged."""


def weights_notes(model: Designer) -> list[str]:
    """Return a line on published weights, with their license, for readers of results; none for other models."""
    return [f"weights: {model.weights}; these structures may be in their training data"] if model.weights else []


def generate(
    model: Designer,
    requests: Sequence[Request],
    numbers: int | Sequence[int],
    *,
    seed: int = 0,
    tokens: int = DEFAULT_TOKENS,
) -> Iterator[Design]:
    """Yield designs of a seed for each request, in order, batch by batch: the first n, or those with these numbers."""
    numbers_N = np.arange(numbers) if isinstance(numbers, int) else np.array(numbers)
    lengths = np.repeat([len(request.structure.residues) for request in requests], len(numbers_N))

    @torch.inference_mode()
    def launch(indices: Indices) -> dict[str, Tensor]:
        # One generator per design, seeded by its number, so that a design does not depend on its batch.
        own_numbers = numbers_N[indices % len(numbers_N)].tolist()
        states = [np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] for number in own_numbers]
        generators = [torch.Generator().manual_seed(int(state >> np.uint64(1))) for state in states]
        designs = model.designs([requests[index] for index in (indices // len(numbers_N)).tolist()], generators)
        return dict(zip(("tokens", "probabilities"), designs, strict=True))

    loop = ForwardLoop(model.device, one_by_one(launch), lambda index: f"design {index} of {lengths[index]:,} residues")
    # A batch ends with the design that exceeds a multiple of the token budget.
    batch_ids = np.cumsum(lengths + 2) // max(tokens, int(lengths.max()) + 2)
    batches = np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(batch_ids)) + 1)
    for indices, designs in loop.run(batches):
        ends = np.cumsum(lengths[indices])[:-1].tolist()
        if not designs["probabilities"].isfinite().all():
            raise DataError("the model computed NaN or infinite probabilities; its weights may be damaged")
        texts = np.split(np.array(VOCABULARY)[designs["tokens"].numpy()], ends)
        probabilities = np.split(designs["probabilities"].numpy(), ends)
        for index, text, rows in zip(indices.tolist(), texts, probabilities, strict=True):
            yield Design("".join(text), rows, int(numbers_N[index % len(numbers_N)]))


def log_likelihoods(
    model: Designer,
    structure: Structure,
    sequences: Sequence[str],
    *,
    label: int = NO_LABEL,
    tokens: int = DEFAULT_TOKENS,
) -> NDArray[np.float64]:
    """(sequences,) mean log-likelihood per residue, in nats, given the structure.

    Residues other than the 20 amino acids are ignored. All sequences are scored by the same random draws.
    """

    # Indices are of pairs of a sequence and a draw, with the draws of a sequence next to each other.
    @torch.inference_mode()
    def launch(indices: Indices) -> dict[str, Tensor]:
        rows, draws = np.divmod(indices, model.draws)
        texts = [sequences[row] for row in rows.tolist()]
        log_p_CLA = model.log_p(structure, texts, draws.tolist(), label)
        # Columns of the sequences' residues; -1 for other letters.
        wanted_CL = torch.tensor([[AMINO_ACIDS.find(letter) for letter in text] for text in texts], device=model.device)
        log_p_CL = log_p_CLA.gather(-1, wanted_CL.clamp(min=0)[..., None])[..., 0]
        return {"means": log_p_CL.masked_fill(wanted_CL < 0, torch.nan).double().nanmean(1)}

    length = len(structure.residues)
    loop = ForwardLoop(
        model.device, one_by_one(launch), lambda index: f"sequence {index // model.draws + 1} of {length:,} residues"
    )
    means = np.empty((len(sequences), model.draws))
    for indices, totals in loop.run(consecutive(means.size, max(1, tokens // (length + 2)))):
        means.flat[indices] = totals["means"].numpy()
    # In a short sequence, all judged residues of a draw may be non-standard.
    return np.nanmean(means, axis=1)


def gumbel(uniform: Tensor) -> Tensor:
    """Turn random numbers in [0, 1) into Gumbel noise g: argmax of log p + T g is a draw at temperature T."""
    # Clamped, because 0 and 1 have no finite logarithm.
    return -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))


def structure_batch(structures: Sequence[Structure], label: int = NO_LABEL) -> PackedBatch:
    """Pack structures with their residues. <cls> and <eos> have no coordinates."""
    by_token: dict[str, list[NDArray]] = {
        COORDINATES: [
            np.pad(item.coordinates, ((1, 1), (0, 0), (0, 0)), constant_values=np.nan) for item in structures
        ],
        CHAINS: [np.pad(item.chains.astype(np.int64), 1) for item in structures],
        NUMBERS: [np.pad(chain_positions(item.packed_numbers), 1) for item in structures],
    }
    return pack_sequences([item.residues for item in structures]).adding(
        {name: torch.from_numpy(np.concatenate(rows)) for name, rows in by_token.items()},
        {LABELS: torch.full((len(structures),), label)},
    )


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
    _, _, matches = known.alignment(query, hits[0])
    return 1 - matches / len(residues), known.store.id(hits[0].record)
