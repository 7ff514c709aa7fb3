"""What the field reports of designs on given structures, beside what needs no structure, or no more than its turns.

In: a model, a structure store and records of it. Out: recovery of native residues and perplexity, of all residues and
by secondary structure and burial, beside two baselines from the other records: the composition alone, and the
composition of each kind of secondary structure. Intervals are of proteins drawn with replacement.

Recovery is not designability: many sequences fold alike, and a high recovery may come with sequences that don't.

Shape legend: L residues of a protein, S states, A = 20 amino acids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from dataset.fasta.alphabet import AMINO_ACIDS
from dataset.structures.store import Structure, StructureStore
from inference.design.sampling import Request, generate
from inference.design.scoring import log_likelihoods
from model.tasks.diffusion import SequenceDiffusion

SHORT = 100
"""Residues up to which a protein is short, as in CATH's benchmark."""
ELEMENTS = "abc"
"""Helix, strand and other of P-SEA (Labesse et al. 1997), which needs CA atoms alone."""
_CONTACT, _BURIED = 10.0, 18
"""Å between CA atoms in contact, and contacts from which a residue counts as buried."""
_DRAWS = 1000


@dataclass
class Evaluation:
    """Metrics of the proteins.

    Attributes:
        metrics: by name: value, and the ends of its 95 % interval.
        proteins: evaluated.
        left_out: records without a structure, or without a native residue to recover.
    """

    proteins: int
    left_out: int
    metrics: dict[str, tuple[float, float, float]] = field(default_factory=dict)


@dataclass
class _Protein:
    right: NDArray[np.bool_]  # (judged residues,)
    by_composition: NDArray[np.bool_]
    by_element: NDArray[np.bool_]
    helix_or_strand: NDArray[np.bool_]
    buried: NDArray[np.bool_]
    loss: float
    composition_loss: float
    element_loss: float
    length: int


def evaluate_designs(
    model: SequenceDiffusion,
    store: StructureStore,
    records: NDArray[np.int64],
    *,
    steps: int = 20,
    batch_tokens: int = 8192,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Evaluate the likeliest design of each of these structures.

    The baselines are of the store's other structures; of these themselves, which favours the baselines, where it has no
    others. Raises DataError where no record can be evaluated.
    """
    others = np.setdiff1d(np.arange(len(store)), records)
    shares_SA = _shares(store, others if others.size else records)
    proteins = []
    for number, structure in enumerate(structures_of_store(store, records), 1):
        progress(number, records.size)
        judged = any(letter in AMINO_ACIDS for letter in structure.residues)
        if not (judged and np.isfinite(structure.coordinates[:, 1, 0]).any()):
            continue
        (design,) = generate(model, Request(structure, temperature=0.0, steps=steps), 1, batch_tokens=batch_tokens)
        (likelihood,) = log_likelihoods(model, structure, [structure.residues], batch_tokens=batch_tokens)
        proteins.append(_judged(structure, design.residues, float(likelihood), shares_SA))
    if not proteins:
        raise DataError(f"{store.path}: none of {records.size} records has a structure; give --predictions")
    return _summed(proteins, records.size - len(proteins))


def structures_of_store(store: StructureStore, records: NDArray[np.int64]) -> Iterator[Structure]:
    """Records of a store as structures."""
    for record in records.tolist():
        residues = store.store.text(record)
        atoms, confidence, chains = store.atoms(record, 0, len(residues))
        names = tuple(map(str, range(int(chains.max(initial=0)) + 1)))
        yield Structure(store.store.id(record), residues, atoms.astype(np.float32), confidence, chains, names)


def elements_of(structure: Structure) -> NDArray[np.int64]:
    """(L,) place in :data:`ELEMENTS` of each residue; other where there are no coordinates."""
    import biotite.structure as struc

    known = np.flatnonzero(np.isfinite(structure.coordinates[:, 1, 0]))
    atoms = struc.AtomArray(len(known))
    atoms.coord = structure.coordinates[known, 1]
    atoms.atom_name[:], atoms.res_name[:] = "CA", "ALA"
    atoms.res_id, atoms.chain_id = known + 1, structure.chains[known].astype("U4")
    found = np.full(len(structure.residues), ELEMENTS.index("c"))
    found[known] = [max(0, ELEMENTS.find(letter)) if letter else 2 for letter in struc.annotate_sse(atoms)]
    return found


def _contacts(structure: Structure) -> NDArray[np.int64]:
    """(L,) residues whose CA is near."""
    ca = structure.coordinates[:, 1]
    apart = np.linalg.norm(ca[:, None] - ca[None], axis=-1)
    return np.nansum(apart < _CONTACT, axis=1) - 1


def _shares(store: StructureStore, records: NDArray[np.int64]) -> NDArray[np.float64]:
    """(S + 1, 20): shares of the amino acids in each kind of element, and in all, of these records."""
    counts = np.ones((len(ELEMENTS), len(AMINO_ACIDS)))
    for structure in structures_of_store(store, records):
        letters = np.array([AMINO_ACIDS.find(letter) for letter in structure.residues])
        judged = letters >= 0
        np.add.at(counts, (elements_of(structure)[judged], letters[judged]), 1)
    counts = np.concatenate([counts, counts.sum(axis=0, keepdims=True)])
    return counts / counts.sum(axis=1, keepdims=True)


def _judged(structure: Structure, design: str, likelihood: float, shares_SA: NDArray[np.float64]) -> _Protein:
    letters = np.array([AMINO_ACIDS.find(letter) for letter in structure.residues])
    judged = letters >= 0
    native, elements = letters[judged], elements_of(structure)[judged]
    designed = np.array([AMINO_ACIDS.find(letter) for letter in design])[judged]
    return _Protein(
        right=designed == native,
        by_composition=native == shares_SA[-1].argmax(),
        by_element=native == shares_SA[elements].argmax(axis=1),
        helix_or_strand=elements < ELEMENTS.index("c"),
        buried=(_contacts(structure) >= _BURIED)[judged],
        loss=-likelihood,
        composition_loss=float(-np.log(shares_SA[-1][native]).mean()),
        element_loss=float(-np.log(shares_SA[elements, native]).mean()),
        length=len(structure.residues),
    )


def _summed(proteins: list[_Protein], left_out: int) -> Evaluation:
    """Medians over proteins of recovery, and perplexities; intervals by the bootstrap."""

    def recovery(name: str) -> Callable[[list[_Protein]], float]:
        return lambda some: float(np.median([getattr(each, name).mean() for each in some]))

    def perplexity(name: str) -> Callable[[list[_Protein]], float]:
        def value(some: list[_Protein]) -> float:
            lengths = [each.length for each in some]
            return float(np.exp(np.average([getattr(each, name) for each in some], weights=lengths)))

        return value

    def within(mask: Callable[[_Protein], NDArray[np.bool_]]) -> Callable[[list[_Protein]], float]:
        def value(some: list[_Protein]) -> float:
            right = np.concatenate([each.right[mask(each)] for each in some])
            return float(right.mean()) if right.size else float("nan")

        return value

    def gain(name: str) -> Callable[[list[_Protein]], float]:
        return lambda some: float(np.mean([each.right.mean() - getattr(each, name).mean() for each in some]))

    short = [each for each in proteins if each.length <= SHORT]
    wanted: dict[str, tuple[list[_Protein], Callable[[list[_Protein]], float]]] = {
        "median recovery": (proteins, recovery("right")),
        "median recovery, composition": (proteins, recovery("by_composition")),
        "median recovery, secondary structure": (proteins, recovery("by_element")),
        "mean gain over composition": (proteins, gain("by_composition")),
        "mean gain over secondary structure": (proteins, gain("by_element")),
        f"median recovery, to {SHORT} residues": (short, recovery("right")),
        "recovery, helix and strand": (proteins, within(lambda each: each.helix_or_strand)),
        "recovery, other": (proteins, within(lambda each: ~each.helix_or_strand)),
        "recovery, buried": (proteins, within(lambda each: each.buried)),
        "recovery, exposed": (proteins, within(lambda each: ~each.buried)),
        "perplexity": (proteins, perplexity("loss")),
        f"perplexity, to {SHORT} residues": (short, perplexity("loss")),
        "perplexity, composition": (proteins, perplexity("composition_loss")),
        "perplexity, secondary structure": (proteins, perplexity("element_loss")),
    }
    random = np.random.default_rng(0)
    found = Evaluation(len(proteins), left_out)
    for name, (some, value) in wanted.items():
        if some and np.isfinite(value(some)):  # there may be no buried residue
            draws = [
                value([some[place] for place in random.integers(len(some), size=len(some))]) for _ in range(_DRAWS)
            ]
            low, high = np.nanpercentile(draws, [2.5, 97.5])
            found.metrics[name] = value(some), float(low), float(high)
    return found
