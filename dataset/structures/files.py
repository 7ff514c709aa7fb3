"""Structure files to chains: PDB, mmCIF and BinaryCIF, plain or gzip, known by what is in them and not by their names.

Of the first model, atoms of highest occupancy are taken; a modified residue (MSE) is read as what it derives from, an
unknown one as X; a residue that lacks N, CA or C keeps its letter and has no coordinates; a missing O is placed.
Residues that are not in the file at all are a break of the chain.

Shape legend: R residues of a chain.
"""

import codecs
import gzip
import io
import re
import warnings
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.text import first_line
from dataset.structures.ca_trace import LONGEST_STEP, completed
from dataset.structures.sample import placed, torsion
from dataset.structures.store import Structure, StructureCounts
from train_config.diffusion_schema import StructuresSection

SUFFIXES = (".pdb", ".ent", ".cif", ".mmcif", ".bcif")
BACKBONE = ("N", "CA", "C", "O")
_LONGEST_BOND = 2.5
_LONGEST_ID = 200
_MOST_CHAINS = 127
_C_O, _CA_C_O = 1.231, 120.1


class _Chain(NamedTuple):
    name: str
    letters: str
    coordinates: NDArray[np.float32]
    confidence: NDArray[np.int8]


def is_structure_name(path: Path) -> bool:
    """Return whether the name ends like a structure file's."""
    return path.name.lower().removesuffix(".gz").endswith(SUFFIXES)


def read_structures(path: Path, section: StructuresSection, counts: StructureCounts) -> list[Structure]:
    """The wanted chains of a file. ``counts`` is added to; raises DataError that names file and chain."""
    atoms, predicted = _read_atoms(path, counts)
    counts.files += 1
    chains = [
        chain for name in _chain_names(atoms, path) if (chain := _chain(atoms, name, path, section, counts, predicted))
    ]
    if not chains:
        raise DataError(f"{path}: no chain of amino acids with N, CA and C of {section.min_residues} residues")
    chosen = _chosen(chains, section.chains, path)
    if section.chains == "complex" and len(chosen) > _MOST_CHAINS:
        raise DataError(f"{path}: {len(chosen)} chains; a complex may have {_MOST_CHAINS}")
    counts.chains += len(chosen)
    stem = path.name.removesuffix(".gz").rpartition(".")[0][:_LONGEST_ID].replace(" ", "_")
    if section.chains == "complex":
        return [_structure(stem, chosen)]
    return [_structure(f"{stem}_{chain.name}" if chain.name else stem, [chain]) for chain in chosen]


def _structure(record: str, chains: list[_Chain]) -> Structure:
    return Structure(
        id=record,
        residues="".join(chain.letters for chain in chains),
        coordinates=np.concatenate([chain.coordinates for chain in chains]),
        confidence=np.concatenate([chain.confidence for chain in chains]),
        chains=np.repeat(np.arange(len(chains), dtype=np.int8), [len(chain.letters) for chain in chains]),
        chain_names=tuple(chain.name for chain in chains),
    )


def _chosen(chains: list[_Chain], rule: str, path: Path) -> list[_Chain]:
    if rule in ("each", "complex"):
        return chains
    if rule == "first":
        return chains[:1]
    by_name = {chain.name: chain for chain in chains}
    names = [name.strip() for name in rule.split(",")]
    missing = [name for name in names if name not in by_name]
    if missing:
        raise DataError(f"{path}: has no protein chain {', '.join(missing)}; it has {', '.join(by_name)}")
    return [by_name[name] for name in names]


def _read_atoms(path: Path, counts: StructureCounts) -> tuple[Any, bool]:
    """Atoms of the first model, one place each, and whether the structure is a prediction."""
    import biotite.structure as struc  # here: plans and refusals need none of it
    from biotite.structure.io import pdb, pdbx

    content = _content(path)
    fields: dict[str, Any] = {"model": 1, "altloc": "all", "extra_fields": ["b_factor", "occupancy"]}
    start = content[:4096].lstrip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of elements that are guessed, which are not looked at
            is_binary = content[:1] in (b"\x83", b"\x84", b"\x82")
            if is_binary or start.startswith((b"data_", b"#")):
                kind: Any = pdbx.BinaryCIFFile if is_binary else pdbx.CIFFile
                file: Any = kind.read(io.BytesIO(content) if is_binary else io.StringIO(content.decode()))
                if "atom_site" not in file.block:
                    raise DataError(f"{path}: an mmCIF file without atoms")
                models, atoms = pdbx.get_model_count(file), pdbx.get_structure(file, **fields)
                predicted = "ma_qa_metric" in file.block
            else:
                text = content.decode("latin-1")
                if not any(line.startswith(("ATOM  ", "HETATM")) for line in text.splitlines()):
                    raise DataError(f"{path}: no PDB, mmCIF or BinaryCIF file: it holds no atoms")
                file = pdb.PDBFile.read(io.StringIO(text))
                models, atoms = file.get_model_count(), file.get_structure(**fields)
                predicted = bool(re.search(r"^TITLE .*(ALPHAFOLD|ESMFOLD).*PREDICTION", text.upper(), re.MULTILINE))
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: damaged or truncated, can't be read ({first_line(error)})") from error
    counts.other_models += models - 1
    kept = struc.filter_highest_occupancy_altloc(atoms, atoms.altloc_id, atoms.occupancy)
    counts.alternate_atoms += int((~kept).sum())
    return atoms[kept], predicted


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: can't be read ({error})") from error
    if content[:2] == b"PK":
        raise DataError(f"{path}: a zip archive; unpack it and give its folder")
    if not content.strip():
        raise DataError(f"{path}: the file is empty")
    return content.removeprefix(codecs.BOM_UTF8)


def _chain_names(atoms: Any, path: Path) -> list[str]:
    """Chains in the order of the file. Raises DataError where a name stands for two."""
    names = atoms.chain_id[~atoms.hetero]
    starts: Any = np.flatnonzero(np.concatenate([[True], names[1:] != names[:-1]])) if len(names) else []
    runs = Counter(str(names[start]) for start in starts)
    if twice := [name for name, count in runs.items() if count > 1]:
        raise DataError(f"{path}: chain {', '.join(sorted(twice))!r} stands twice in the file; rename one of them")
    return list(dict.fromkeys(map(str, atoms.chain_id)))


def _chain(
    atoms: Any, name: str, path: Path, section: StructuresSection, counts: StructureCounts, predicted: bool
) -> _Chain | None:
    """The amino acids of a chain; None where it has too few, which is counted."""
    import biotite.structure as struc
    from biotite.structure import info

    own = atoms[atoms.chain_id == name]
    # A residue that the dictionary of components doesn't know is one by its CA; calcium is an ion of that name.
    unknown = struc.apply_residue_wise(own, (own.atom_name == "CA") & (own.res_name != "CA"), np.any)
    protein = own[struc.filter_amino_acids(own) | struc.spread_residue_wise(own, unknown)]
    if not len(protein):
        counts.other_polymers += bool((~own.hetero).any())
        return None
    starts = struc.get_residue_starts(protein)
    coordinates, confidence = _backbone(protein, starts, predicted)
    bonded = _bonded(coordinates)
    # Amino acids among the ligands are no part of the chain unless a peptide bond says so.
    kept = ~protein.hetero[starts] | np.append(False, bonded) | np.append(bonded, False)
    coordinates, confidence, starts = coordinates[kept], confidence[kept], starts[kept]
    numbers = Counter(zip(protein.res_id[starts].tolist(), protein.ins_code[starts].tolist(), strict=True))
    for (number, code), times in numbers.most_common(1):
        if times > 1:
            raise DataError(
                f"{path}: chain {name!r} has {times} residues {number}{code}; if it is several chains, rename them"
            )
    names = protein.res_name[starts].tolist()
    letters = []
    for three in names:
        letter = _STANDARD.get(three) or info.one_letter_code(three) or "X"
        letters.append(letter if letter in _STANDARD.values() else "X")
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
    if whole.sum() < section.min_residues:
        counts.short_chains += 1
        return None
    counts.unknown_residues += letters.count("X")
    counts.incomplete_residues += int((~whole).sum())
    coordinates[~whole] = np.nan
    counts.placed_oxygens += _place_oxygens(coordinates)
    counts.breaks += int((~_bonded(coordinates)).sum())
    return _Chain(name, "".join(letters), coordinates, confidence)


def _backbone(protein: Any, starts: NDArray, predicted: bool) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """(R, 4, 3) coordinates, NaN where an atom is missing, and (R,) confidence."""
    coordinates = np.full((len(starts), 4, 3), np.nan, dtype=np.float32)
    residue = np.searchsorted(starts, np.arange(len(protein)), side="right") - 1
    for place, atom in enumerate(BACKBONE):
        here = protein.atom_name == atom
        coordinates[residue[here], place] = protein.coord[here]
    confidence = np.full(len(starts), 100, dtype=np.int8)
    if predicted:
        values = np.nan_to_num(protein.b_factor[starts]).clip(0, 100)
        confidence = (values * (100 if values.max() <= 1 else 1)).astype(np.int8)
    return coordinates, confidence


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
        coordinates[missing, 3] = placed(n, ca, c, _C_O, _CA_C_O, psi + np.pi)
    return int(missing.size)


_STANDARD = {
    **{"ALA": "A", "CYS": "C", "ASP": "D", "GLU": "E", "PHE": "F", "GLY": "G", "HIS": "H", "ILE": "I", "LYS": "K"},
    **{"LEU": "L", "MET": "M", "ASN": "N", "PRO": "P", "GLN": "Q", "ARG": "R", "SER": "S", "THR": "T", "VAL": "V"},
    **{"TRP": "W", "TYR": "Y", "SEC": "U", "PYL": "O", "ASX": "B", "GLX": "Z", "UNK": "X"},
}
