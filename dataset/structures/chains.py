"""Atoms of a structure file to chains of amino acids: one conformer of each residue, its letter and its backbone.

- A residue is taken in the conformer of highest mean occupancy of N, CA and C, of those that have all three.
- Names of force fields and protonation states (HIE, GLUP, NALA) are read as the standard residue before the PDB's
  dictionary is consulted: there, HSE is homoserine. A modified residue (MSE) is read as what it derives from, an
  unknown one as X.
- A residue that lacks N, CA or C keeps its letter and has no coordinates; a missing O is placed.
- Residues that are not in the file at all are a break of the chain.

Shape legend: R residues of a chain, n atoms.
"""

from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from biotite.structure import info
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.dataset.section import StructuresSection
from esmeray.dataset.structures.ca_trace import LONGEST_STEP, completed
from esmeray.dataset.structures.sample import C_O, CA_C_O, bonded_atom, torsion
from esmeray.dataset.structures.store import Structure, StructureCounts, residue_label

ATOMS = ("N", "CA", "C", "O")
_LONGEST_BOND = 2.5
_STANDARD = {
    **{"ALA": "A", "CYS": "C", "ASP": "D", "GLU": "E", "PHE": "F", "GLY": "G", "HIS": "H", "ILE": "I", "LYS": "K"},
    **{"LEU": "L", "MET": "M", "ASN": "N", "PRO": "P", "GLN": "Q", "ARG": "R", "SER": "S", "THR": "T", "VAL": "V"},
    **{"TRP": "W", "TYR": "Y", "SEC": "U", "PYL": "O", "ASX": "B", "GLX": "Z", "UNK": "X"},
}
_OF_FORCE_FIELDS = {
    **dict.fromkeys(("HIE", "HID", "HIP", "HSD", "HSE", "HSP", "HSC"), "HIS"),
    **dict.fromkeys(("CYX", "CYM", "CYN", "CYD"), "CYS"),
    **dict.fromkeys(("ASH", "AS4"), "ASP"),
    **dict.fromkeys(("GLH", "GL4"), "GLU"),
    **dict.fromkeys(("LYN", "LYP", "LSN"), "LYS"),
    **dict.fromkeys(("ARN", "AR0", "RN1", "RN2", "RN3"), "ARG"),
    **dict.fromkeys(("TYM", "Y1P"), "TYR"),
    **{"S1P": "SER", "T1P": "THR"},
}
"""Protonation states and disulfides of AMBER, CHARMM, OPLS, PDB2PQR and Rosetta, by names of three letters."""
_TITRATED = ("ASP", "GLU", "HIS", "LYS", "ARG", "CYS", "TYR", "SER", "THR")
"""Residues to whose names GROMACS, GROMOS and CHARMM add a letter: ASPP, HISE, LYSH, CYS2."""


def standard_name(name: str) -> str:
    """Standard residue that a force field's name stands for; empty for any other name."""
    core = name[1:] if len(name) > 3 and name[0] in "NC" else name  # AMBER's ends of chains: NALA, CHIE, NCYS2
    for known in (name, core):
        if known in _OF_FORCE_FIELDS:
            return _OF_FORCE_FIELDS[known]
        if len(known) == 4 and known[:3] in _TITRATED:
            return known[:3]
    return core if core != name and core in _STANDARD else ""


def is_amino_acid(name: str) -> bool:
    return name in _STANDARD


def chain_names(atoms: Any, path: Path) -> list[str]:
    """Chains in the order of the file. Raises DataError where a name stands for two."""
    # Of ligands and water, which stand behind all chains, a second run is as it should be.
    runs = Counter(name for name, _ in groupby(atoms.chain_id[~atoms.hetero].tolist()))
    twice = [name for name, count in runs.items() if count > 1]
    if twice:
        raise DataError(f"{path}: chain {', '.join(sorted(twice))!r} stands twice in the file; rename one of them")
    return list(dict.fromkeys(map(str, atoms.chain_id)))


def chain_of(
    atoms: Any, name: str, path: Path, section: StructuresSection, counts: StructureCounts
) -> Structure | None:
    """The amino acids of a chain, its name as id; None where it has too few, which is counted."""
    own = atoms[atoms.chain_id == name]
    protein, given_names = _amino_acids(own)
    if not len(protein):
        counts.other_polymers += bool((~own.hetero).any())
        return None
    order, starts = _likeliest_conformers(protein)
    counts.alternate_atoms += len(protein) - len(order)
    protein, given_names = protein[order], given_names[order]
    coordinates, confidence = _backbone(protein, starts, counts)
    bonded = _bonded(coordinates)
    # Amino acids among the ligands are no part of the chain unless a peptide bond says so.
    kept = ~protein.hetero[starts] | np.append(False, bonded) | np.append(bonded, False)
    coordinates, confidence, starts = coordinates[kept], confidence[kept], starts[kept]
    numbers = protein.number[starts]
    for number, times in Counter(numbers.tolist()).most_common(1):
        if times > 1:
            raise DataError(
                f"{path}: chain {name!r} has {times} residues {residue_label(number)}; if it is several chains, rename "
                "them"
            )
    letters = []
    renamed = 0
    for three, given in zip(protein.res_name[starts].tolist(), given_names[starts].tolist(), strict=True):
        # The table first: the dictionary of components takes a while to load, and most files need none of it.
        letter = _STANDARD.get(three) or info.one_letter_code(three) or "X"
        letters.append(letter if letter in _STANDARD.values() else "X")
        renamed += three != given
        counts.modified_residues += three not in _STANDARD and letters[-1] != "X"
    has_ca = np.isfinite(coordinates[:, 1, 0])
    whole = np.isfinite(coordinates[:, :3]).all((1, 2))
    if has_ca.any() and not whole.any():
        if section.ca_only == "error":
            raise DataError(
                f"{path}: chain {name}: of CA atoms alone; a backbone needs N, CA and C: --data.structures.ca_only "
                "complete places them, skip leaves such chains out"
            )
        if section.ca_only == "skip":
            counts.ca_only_chains += 1
            return None
        counts.completed_chains += 1
        coordinates = completed(coordinates[:, 1])
        whole = np.isfinite(coordinates[:, :3]).all((1, 2))
    # Counted by residues with coordinates: a peptide of unknown ones is nothing to learn from.
    if whole.sum() < section.min_residues:
        counts.short_chains += 1
        return None
    counts.renamed_residues += renamed
    counts.unknown_residues += letters.count("X")
    counts.incomplete_residues += int((~whole).sum())
    coordinates[~whole] = np.nan  # also what is known of them: models take a residue's frame or nothing
    counts.placed_oxygens += _place_oxygens(coordinates)
    counts.breaks += int((~_bonded(coordinates)).sum())
    chains = np.zeros(len(letters), np.int8)
    return Structure(name, "".join(letters), coordinates, confidence, chains, (name,), numbers)


def _amino_acids(own: Any) -> tuple[Any, NDArray[np.str_]]:
    """A chain's atoms of amino acids, under standard names if a force field has others, and the names of the file."""
    given_names = own.res_name.copy()
    names, name_n = np.unique(given_names, return_inverse=True)
    _, residue_n = np.unique(own.number * np.int64(len(names)) + name_n, return_inverse=True)

    def with_atoms(is_there_n: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return (np.bincount(residue_n, weights=is_there_n) > 0)[residue_n]

    # A residue that the dictionary of components doesn't know is one by its CA; calcium is an ion of that name.
    has_ca = with_atoms((own.atom_name == "CA") & (given_names != "CA"))
    # The dictionary has other molecules by these names: cyanide (CYN) has no O, homoserine (HSE) numbers its carbons.
    other = with_atoms(np.isin(own.atom_name, ("C1", "C2", "C3", "N1", "O3", "OD")))
    standard_names = np.array(list(map(standard_name, names.tolist())))[name_n]
    is_renamed = (standard_names != "") & (has_ca | with_atoms(own.atom_name == "O")) & ~other
    own.res_name = np.where(is_renamed, standard_names, given_names)
    is_protein = np.isin(names, info.amino_acid_names())[name_n] | has_ca | is_renamed
    return own[is_protein], given_names[is_protein]


def _likeliest_conformers(protein: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the atoms of one conformer of each residue, residue by residue, and where among them each begins."""
    # biotite's residue starts overlook a change of the name alone.
    is_new = (np.diff(protein.number) != 0) | (protein.res_name[1:] != protein.res_name[:-1])
    starts = np.flatnonzero(np.concatenate([[True], is_new, [True]]))
    is_shared = protein.altloc_id == ""
    if is_shared.all():
        return np.arange(len(protein)), starts[:-1]
    residues: list[list[int]] = []
    known: dict[int, list[int]] = {}
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        residue = known.get(int(protein.number[start]))
        # Two kinds of residue at one place, and alternates behind the chain, are one residue; without an identifier of
        # either they are two of one number.
        if residue is None or (is_shared[residue].any() and is_shared[start:stop].any()):
            residue = known[int(protein.number[start])] = []
            residues.append(residue)
        residue += range(start, stop)
    chosen = [residue if is_shared[residue].all() else _likeliest(protein, np.array(residue)) for residue in residues]
    return np.concatenate(chosen).astype(np.int64), np.cumsum([0, *map(len, chosen[:-1])])


def _likeliest(protein: Any, residue_n: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of the atoms of a residue's conformer with the highest mean occupancy of N, CA and C, the first on a tie,
    of those that have all three, if there are any."""
    names, kinds, altlocs = (array[residue_n] for array in (protein.atom_name, protein.res_name, protein.altloc_id))
    best: tuple[tuple[int, float], NDArray[np.int64]] | None = None
    for kind, altloc in dict.fromkeys(zip(kinds.tolist(), altlocs.tolist(), strict=True)):
        is_own = (kinds == kind) & (altlocs == altloc)
        others = (kinds == kind) & (altlocs != altloc)
        # Atoms without an identifier belong to all conformers. They are one themselves if others repeat their backbone.
        if altloc == "" and others.any() and not np.isin(names[is_own & np.isin(names, ATOMS)], names[others]).any():
            continue
        members = is_own | (others & (altlocs == "") & ~np.isin(names, names[is_own]))
        backbone = members & np.isin(names, ATOMS[:3])
        occupancy = float(protein.occupancy[residue_n[backbone]].mean()) if backbone.any() else -1.0
        rank = len(set(names[backbone].tolist())), occupancy
        if best is None or rank > best[0]:
            best = rank, residue_n[members]
    assert best is not None
    return best[1]


def _backbone(
    protein: Any, starts: NDArray[np.int64], counts: StructureCounts
) -> tuple[NDArray[np.float32], NDArray[np.float16]]:
    """(R, 4, 3) coordinates, NaN where an atom is missing, and (R,) confidence, CA's if it is there."""
    coordinates = np.full((len(starts), 4, 3), np.nan, dtype=np.float32)
    confidence = protein.confidence[starts]
    residue_n = np.searchsorted(starts, np.arange(len(protein)), side="right") - 1
    for column, atom in enumerate(ATOMS):
        rows = np.flatnonzero(protein.atom_name == atom)
        # Assigned last, so that it stays: of an atom that is there twice the position of highest occupancy.
        rows = rows[np.lexsort((-rows, protein.occupancy[rows]))]
        counts.alternate_atoms += len(rows) - len(np.unique(residue_n[rows]))
        coordinates[residue_n[rows], column] = protein.coord[rows]
        if atom == "CA":
            confidence[residue_n[rows]] = protein.confidence[rows]
    return coordinates, confidence.astype(np.float16)


def _bonded(coordinates: NDArray[np.float32]) -> NDArray[np.bool_]:
    """(R - 1,): whether C of a residue is bonded to N of the next, by their CA where one of both is missing."""
    with np.errstate(invalid="ignore"):
        bonds = np.linalg.norm(coordinates[1:, 0] - coordinates[:-1, 2], axis=-1)
        steps = np.linalg.norm(coordinates[1:, 1] - coordinates[:-1, 1], axis=-1)
        return np.where(np.isnan(bonds), steps < LONGEST_STEP, bonds < _LONGEST_BOND)


def _place_oxygens(coordinates: NDArray[np.float32]) -> int:
    """Place missing O opposite to N of the next residue, or as in a helix where there is none; returns their number."""
    missing = np.flatnonzero(np.isfinite(coordinates[:, 2, 0]) & ~np.isfinite(coordinates[:, 3]).all(1))
    if missing.size:
        n, ca, c = (coordinates[missing, atom].astype(np.float64) for atom in range(3))
        following = np.full_like(n, np.nan)
        inside = missing + 1 < len(coordinates)
        following[inside] = coordinates[missing[inside] + 1, 0]
        near = np.linalg.norm(following - c, axis=-1) < _LONGEST_BOND
        psi = np.where(near, torsion(n, ca, c, np.where(near[:, None], following, n + 1)), np.radians(-47.0))
        coordinates[missing, 3] = bonded_atom(n, ca, c, C_O, CA_C_O, psi + np.pi)
    return int(missing.size)
