"""Metrics for designs on given structures: recovery of native residues and perplexity.

They are computed overall, and by secondary structure and burial.

Two baselines come from other records: the composition, and the composition of each kind of secondary structure.
Intervals are bootstrap intervals over proteins.

Recovery is not designability: many sequences fold alike, and a high recovery may come with sequences that don't.
Shape legend: L residues of a protein, S states, A = 20 amino acids.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.common.statistics import percentile_interval, resamplings
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.structures.store import Structure, StructureStore
from esmeray.inference.design.sampling import Request, generate, log_likelihoods
from esmeray.tasks.diffusion.model import SequenceDiffusion
from esmeray.train_config.section import DEFAULT_TOKENS

SHORT = 100
"""Maximum residues of a short protein, as in CATH's benchmark."""
ELEMENTS = "abc"
"""P-SEA states: helix, strand and other (Labesse et al. 1997). P-SEA needs CA atoms only."""
_CONTACT, _BURIED = 10.0, 18
"""Contact distance between CA atoms in Å, and the minimum number of contacts of a buried residue."""
_DRAWS = 1000
_Statistic: TypeAlias = Callable[[NDArray[np.int64]], float]
"""A statistic of the proteins with these indices."""


@dataclass
class Evaluation:
    """Metrics of the evaluated proteins: value and the two ends of the 95 % interval.

    ``left_out`` counts the records without a structure or without a native residue to recover.
    """

    proteins: int
    left_out: int
    metrics: dict[str, tuple[float, float, float]] = field(default_factory=dict)


def evaluate_designs(
    model: SequenceDiffusion,
    store: StructureStore,
    records: NDArray[np.int64],
    *,
    steps: int = 20,
    tokens: int = DEFAULT_TOKENS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Evaluate the likeliest design for each of these structures.

    The baselines are computed from the store's other structures. If there are none, the evaluated structures are used,
    which favours the baselines.

    Raises DataError if no record can be evaluated.
    """
    # Evaluated structures are excluded, because otherwise the baseline would know their composition.
    others = np.setdiff1d(np.arange(len(store)), records)
    shares_SA = _shares(store, others if others.size else records)
    proteins = []
    for number, structure in enumerate(map(store.structure, records.tolist()), 1):
        progress(number, records.size)
        judged = any(letter in AMINO_ACIDS for letter in structure.residues)
        if not (judged and np.isfinite(structure.coordinates[:, 1, 0]).any()):
            continue
        # At temperature 0 there is one design, so recovery depends on the model only.
        (design,) = generate(model, Request(structure, temperature=0.0, steps=steps), 1, tokens=tokens)
        (likelihood,) = log_likelihoods(model, structure, [structure.residues], tokens=tokens)
        proteins.append(_judged(structure, design.residues, float(likelihood), shares_SA))
    if not proteins:
        raise DataError(
            f"{store.path}: none of the {records.size} records has a structure; give --evaluate.predictions"
        )
    return _summed(proteins, records.size - len(proteins))


def elements_of(structure: Structure) -> NDArray[np.int64]:
    """(L,) index of each residue's state in :data:`ELEMENTS`; other for residues without coordinates."""
    import biotite.structure as struc

    known = np.flatnonzero(np.isfinite(structure.coordinates[:, 1, 0]))
    atoms = struc.AtomArray(len(known))
    atoms.coord = structure.coordinates[known, 1]
    atoms.atom_name[:], atoms.res_name[:] = "CA", "ALA"
    atoms.res_id, atoms.chain_id = known + 1, structure.chains[known].astype("U4")
    elements = np.full(len(structure.residues), ELEMENTS.index("c"))
    # biotite returns an empty letter for residues that it can't assign; they count as other.
    elements[known] = [ELEMENTS.index(letter or "c") for letter in struc.annotate_sse(atoms)]
    return elements


def _shares(store: StructureStore, records: NDArray[np.int64]) -> NDArray[np.float64]:
    """(S + 1, 20) shares of the amino acids per state, with the overall shares as the last row."""
    # A pseudocount of 1, because an absent amino acid would make the baseline's perplexity infinite.
    counts = np.ones((len(ELEMENTS), len(AMINO_ACIDS)))
    for structure in map(store.structure, records.tolist()):
        letters = np.array([AMINO_ACIDS.find(letter) for letter in structure.residues])
        judged = letters >= 0
        np.add.at(counts, (elements_of(structure)[judged], letters[judged]), 1)
    counts = np.concatenate([counts, counts.sum(axis=0, keepdims=True)])
    return counts / counts.sum(axis=1, keepdims=True)


def _judged(structure: Structure, design: str, likelihood: float, shares_SA: NDArray[np.float64]) -> dict[str, float]:
    """Numbers of one protein by name: length, recoveries, losses, hits and sizes of regions."""
    letters = np.array([AMINO_ACIDS.find(letter) for letter in structure.residues])
    judged = letters >= 0
    native, elements = letters[judged], elements_of(structure)[judged]
    right = np.array([AMINO_ACIDS.find(letter) for letter in design])[judged] == native
    helix_or_strand = elements < ELEMENTS.index("c")
    ca = structure.coordinates[:, 1]
    contacts = np.nansum(np.linalg.norm(ca[:, None] - ca[None], axis=-1) < _CONTACT, axis=1) - 1
    buried = (contacts >= _BURIED)[judged]
    numbers = {
        "length": len(structure.residues),
        "right": right.mean(),
        "by composition": (native == shares_SA[-1].argmax()).mean(),
        "by element": (native == shares_SA[elements].argmax(axis=1)).mean(),
        "loss": -likelihood,
        "composition loss": -np.log(shares_SA[-1][native]).mean(),
        "element loss": -np.log(shares_SA[elements, native]).mean(),
    }
    regions = {"helix and strand": helix_or_strand, "other": ~helix_or_strand, "buried": buried, "exposed": ~buried}
    for name, inside in regions.items():
        numbers |= {f"hits, {name}": right[inside].sum(), f"size, {name}": inside.sum()}
    return numbers


def _summed(proteins: list[dict[str, float]], left_out: int) -> Evaluation:
    """Compute median recoveries and perplexities over proteins, with bootstrap intervals."""
    columns = {name: np.array([protein[name] for protein in proteins]) for name in proteins[0]}
    lengths_N, right_N = columns["length"], columns["right"]

    def median(name: str) -> _Statistic:
        return lambda rows: float(np.median(columns[name][rows]))

    def gain(name: str) -> _Statistic:
        return lambda rows: float(np.mean((right_N - columns[name])[rows]))

    def perplexity(name: str) -> _Statistic:
        # Perplexity is averaged over residues, as it is defined. Recovery is a median over proteins, as in the papers.
        return lambda rows: float(np.exp(np.average(columns[name][rows], weights=lengths_N[rows])))

    def within(name: str) -> _Statistic:
        hits_N, sizes_N = columns[f"hits, {name}"], columns[f"size, {name}"]
        return lambda rows: float(hits_N[rows].sum() / sizes_N[rows].sum()) if sizes_N[rows].any() else np.nan

    everyone, short = np.arange(len(proteins)), np.flatnonzero(lengths_N <= SHORT)
    statistics: dict[str, tuple[NDArray[np.int64], _Statistic]] = {
        "median recovery": (everyone, median("right")),
        "median recovery, composition": (everyone, median("by composition")),
        "median recovery, secondary structure": (everyone, median("by element")),
        "mean gain over composition": (everyone, gain("by composition")),
        "mean gain over secondary structure": (everyone, gain("by element")),
        f"median recovery, to {SHORT} residues": (short, median("right")),
        **{
            f"recovery, {name}": (everyone, within(name)) for name in ("helix and strand", "other", "buried", "exposed")
        },
        "perplexity": (everyone, perplexity("loss")),
        f"perplexity, to {SHORT} residues": (short, perplexity("loss")),
        "perplexity, composition": (everyone, perplexity("composition loss")),
        "perplexity, secondary structure": (everyone, perplexity("element loss")),
    }
    evaluation = Evaluation(len(proteins), left_out)
    for name, (rows, statistic) in statistics.items():
        if rows.size and np.isfinite(statistic(rows)):  # e.g. no protein has a buried residue
            interval = percentile_interval(
                [statistic(np.repeat(rows, drawn)) for drawn in resamplings(rows.size, _DRAWS, seed=0)]
            )
            evaluation.metrics[name] = statistic(rows), *(interval or (np.nan, np.nan))
    return evaluation
