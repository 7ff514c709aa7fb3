"""Metrics for designs on given structures: recovery of native residues and perplexity.

They are computed overall, and by secondary structure and burial.

Two baselines come from other records: the composition, and the composition of each kind of secondary structure.
Intervals are bootstrap intervals over proteins.

Recovery is not designability: many sequences fold alike, and a high recovery may come with sequences that don't.
Shape legend: L residues of a protein, S states, A = 20 amino acids.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.common.statistics import RESAMPLINGS, percentile_interval, resamplings
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.structures.store import Structure, StructureStore
from esmeray.inference.design.sampling import Designer, Request, generate, log_likelihoods
from esmeray.train_config.section import DEFAULT_TOKENS

SHORT = 100
"""Maximum residues of a short protein, as in CATH's benchmark."""
ELEMENTS = "abc"
"""P-SEA states: helix, strand and other (Labesse et al. 1997). P-SEA needs CA atoms only."""
_CONTACT, _BURIED = 10.0, 18
"""Contact distance between CA atoms in Å, and the minimum number of contacts of a buried residue."""
STEPS = 20
"""Number of denoising steps per sequence."""


@dataclass
class Evaluation:
    """Metrics of the evaluated proteins: value and the two ends of the 95 % interval.

    ``left_out`` counts the records without a structure or without a native residue to recover.
    """

    proteins: int
    left_out: int
    metrics: dict[str, tuple[float, float, float]] = field(default_factory=dict)


def evaluate_designs(
    model: Designer,
    store: StructureStore,
    records: NDArray[np.int64],
    *,
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
    judged = [
        structure
        for structure in map(store.structure, records.tolist())
        if _judged_residues(model, structure).any() and np.isfinite(structure.coordinates[:, 1, 0]).any()
    ]
    if not judged:
        raise DataError(
            f"{store.path}: none of the {records.size} records has a structure; give --evaluate.predictions"
        )
    # At temperature 0 a design's recovery depends on the model only, and on the order of ProteinMPNN.
    requests = [Request(structure, temperature=0.0, steps=STEPS) for structure in judged]
    proteins = []
    designs = generate(model, requests, 1, tokens=tokens)
    for number, (structure, design) in enumerate(zip(judged, designs, strict=True), 1):
        progress(number, len(judged))
        (likelihood,) = log_likelihoods(model, structure, [structure.residues], tokens=tokens)
        judged_L = _judged_residues(model, structure)
        proteins.append(_judged(structure, judged_L, design.residues, float(likelihood), shares_SA))
    table = pd.DataFrame(proteins)
    metrics = _with_intervals(table)
    short = table[table["length"] <= SHORT]
    if len(short):
        of_short = _with_intervals(short)
        metrics |= {f"{name}, to {SHORT} residues": of_short[name] for name in ("median recovery", "perplexity")}
    return Evaluation(len(proteins), records.size - len(proteins), metrics)


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


def _judged_residues(model: Designer, structure: Structure) -> NDArray[np.bool_]:
    """(L,) true for amino acids at positions that the model designs."""
    return np.array([letter in AMINO_ACIDS for letter in structure.residues]) & model.designed(structure)


def _judged(
    structure: Structure, judged: NDArray[np.bool_], design: str, likelihood: float, shares_SA: NDArray[np.float64]
) -> dict[str, float]:
    """Numbers of one protein by name: length, judged residues, recoveries, losses, hits and sizes of regions."""
    letters = np.array([AMINO_ACIDS.find(letter) for letter in structure.residues])
    native, elements = letters[judged], elements_of(structure)[judged]
    right = np.array([AMINO_ACIDS.find(letter) for letter in design])[judged] == native
    helix_or_strand = elements < ELEMENTS.index("c")
    ca = structure.coordinates[:, 1]
    contacts = np.nansum(np.linalg.norm(ca[:, None] - ca[None], axis=-1) < _CONTACT, axis=1) - 1
    buried = (contacts >= _BURIED)[judged]
    numbers = {
        "length": len(structure.residues),
        "judged": judged.sum(),
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


def _with_intervals(table: pd.DataFrame) -> dict[str, tuple[float, float, float]]:
    """Metrics with bootstrap intervals over proteins."""
    drawn = resamplings(len(table), RESAMPLINGS, seed=0)
    resampled = pd.DataFrame([_metrics(table.loc[table.index.repeat(counts_N)]) for counts_N in drawn])
    metrics = {}
    for name, value in _metrics(table).items():
        if np.isfinite(value):  # not finite if e.g. no protein has a buried residue
            low, high = percentile_interval(resampled[name]) or (np.nan, np.nan)
            metrics[name] = float(value), low, high
    return metrics


def _metrics(proteins: pd.DataFrame) -> dict[str, float]:
    """Recovery is a median over proteins, as in the papers; perplexity is averaged over residues, as it is defined."""
    columns = {name: values.to_numpy() for name, values in proteins.items()}
    right_N, judged_N = columns["right"], columns["judged"]
    metrics = {
        "median recovery": np.median(right_N),
        "median recovery, composition": np.median(columns["by composition"]),
        "median recovery, secondary structure": np.median(columns["by element"]),
        "mean gain over composition": np.mean(right_N - columns["by composition"]),
        "mean gain over secondary structure": np.mean(right_N - columns["by element"]),
        "perplexity": np.exp(np.average(columns["loss"], weights=judged_N)),
        "perplexity, composition": np.exp(np.average(columns["composition loss"], weights=judged_N)),
        "perplexity, secondary structure": np.exp(np.average(columns["element loss"], weights=judged_N)),
    }
    for name in ("helix and strand", "other", "buried", "exposed"):
        size = columns[f"size, {name}"].sum()
        metrics[f"recovery, {name}"] = columns[f"hits, {name}"].sum() / size if size else np.nan
    return metrics
