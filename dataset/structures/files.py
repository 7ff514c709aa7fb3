"""Structure files to chains: PDB, mmCIF and BinaryCIF, plain or gzip, known by what is in them and not by their names.

Of the first model, atoms of highest occupancy are taken; a modified residue (MSE) is read as what it derives from, an
unknown one as X; a residue that lacks N, CA or C keeps its letter and has no coordinates; a missing O is placed.
Residues that are not in the file at all are a break of the chain.

biotite is loaded with this module, in 0.7 s, so that plans and refusals import it where they read.

Shape legend: R residues of a chain.
"""

import codecs
import gzip
import io
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import biotite.structure as struc
import msgpack
import numpy as np
from biotite.structure import info
from biotite.structure.io import pdb, pdbx
from numpy.typing import NDArray

from esmeray.common.errors import DataError, reading
from esmeray.common.text import first_line
from esmeray.dataset.fasta.locate import BYTE_ORDER_MARK, pieces_of_lines
from esmeray.dataset.section import StructuresSection
from esmeray.dataset.structures.ca_trace import LONGEST_STEP, completed
from esmeray.dataset.structures.sample import C_O, CA_C_O, bonded_atom, torsion
from esmeray.dataset.structures.store import Structure, StructureCounts

_LONGEST_BOND = 2.5
_LONGEST_ID = 200
_MOST_CHAINS = 127

_FIELDS: dict[str, Any] = {"model": 1, "altloc": "all", "extra_fields": ["b_factor", "occupancy"]}
_ATOMS, _MODEL = ("ATOM", "HETATM"), "MODEL"
_ATOM_SITE, _PREDICTED = "_atom_site.", "_ma_qa_metric."
_GZIP = b"\x1f\x8b"
_LONGEST_LINE = 1 << 16
_PART_LINES = 20_000
_NAMES = ("chain_id", "res_name", "atom_name", "element", "ins_code", "altloc_id")
_LONGEST_NAME_BYTES = 32 * 4
_LONGEST_ROW = 500
"""Characters of an atom's line; those of programs have about 100."""
_HEAD_LINES = 10_000
"""Titles, models and names of columns, beside the atoms."""
_LONGEST_LIST = 10_000
"""Categories, columns and encodings of BinaryCIF; values are bytes, not lists."""


_Read: TypeAlias = tuple[int, Any, bool]
"""Number of models, atoms of the first, and whether it is a prediction."""


def read_structures(path: Path, section: StructuresSection, counts: StructureCounts) -> list[Structure]:
    """The wanted chains of a file. ``counts`` is added to; raises DataError that names file and chain."""
    atoms, predicted = _read_atoms(path, section, counts)
    counts.files += 1
    read = [_chain(atoms, name, path, section, counts, predicted) for name in _chain_names(atoms, path)]
    chains = [chain for chain in read if chain is not None]
    if not chains:
        raise DataError(f"{path}: no chain of amino acids with N, CA and C of {section.min_residues} residues")
    # All chains were read, since a rule names those of amino acids, and messages what there is.
    chosen = _chosen(chains, section.chains, path)
    if section.chains == "complex" and len(chosen) > _MOST_CHAINS:
        raise DataError(f"{path}: {len(chosen)} chains; a complex may have {_MOST_CHAINS}")
    counts.chains += len(chosen)
    stem = path.name.removesuffix(".gz").rpartition(".")[0][:_LONGEST_ID].replace(" ", "_")
    if section.chains != "complex":
        return [replace(chain, id=f"{stem}_{chain.id}" if chain.id else stem) for chain in chosen]
    return [
        Structure(
            id=stem,
            residues="".join(chain.residues for chain in chosen),
            coordinates=np.concatenate([chain.coordinates for chain in chosen]),
            confidence=np.concatenate([chain.confidence for chain in chosen]),
            chains=np.repeat(np.arange(len(chosen), dtype=np.int8), [len(chain.residues) for chain in chosen]),
            chain_names=tuple(chain.id for chain in chosen),
        )
    ]


def _chosen(chains: list[Structure], rule: str, path: Path) -> list[Structure]:
    if rule in ("each", "complex"):
        return chains
    if rule == "first":
        return chains[:1]
    by_name = {chain.id: chain for chain in chains}
    names = [name.strip() for name in rule.split(",")]
    missing = [name for name in names if name not in by_name]
    if missing:
        raise DataError(f"{path}: has no protein chain {', '.join(missing)}; it has {', '.join(by_name)}")
    return [by_name[name] for name in names]


def _read_atoms(path: Path, section: StructuresSection, counts: StructureCounts) -> tuple[Any, bool]:
    """Atoms of the first model, one position each, and whether the structure is a prediction."""
    try:
        with reading(path), warnings.catch_warnings(), path.open("rb") as raw:
            file: Any = gzip.GzipFile(fileobj=raw) if raw.peek(2).startswith(_GZIP) else raw
            warnings.simplefilter("ignore")  # of elements that are guessed, which are not looked at
            # By what is in it: names lie as often as not, and a download may be a page or an archive.
            start = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
            file.seek(0)
            if not start:
                raise DataError(f"{path}: the file is empty")
            if start.startswith(b"PK"):
                raise DataError(f"{path}: a zip archive; unpack it and give its folder")
            if start.startswith((b"\x82", b"\x83", b"\x84")):
                models, atoms, predicted = _of_binary_cif(path, file, section)
            elif start.startswith((b"data_", b"#")):
                models, atoms, predicted = _of_cif(path, file, section)
            else:
                models, atoms, predicted = _of_pdb(path, file, section)
    except DataError:
        raise
    # biotite's parsers raise what Python does, of any kind, at what they don't expect.
    except Exception as error:
        raise DataError(f"{path}: damaged or truncated, can't be read ({first_line(error)})") from error
    counts.other_models += models - 1
    kept = struc.filter_highest_occupancy_altloc(atoms, atoms.altloc_id, atoms.occupancy)
    counts.alternate_atoms += int((~kept).sum())
    return atoms[kept], predicted


def _of_pdb(path: Path, file: BinaryIO, section: StructuresSection) -> _Read:
    head, parts = _gathered(_pdb_lines(_lines(path, file, section)), path, section)
    if not parts[0]:
        raise DataError(f"{path}: no PDB, mmCIF or BinaryCIF file: it holds no atoms")
    arrays = [pdb.PDBFile.read(io.StringIO(part)).get_structure(**_FIELDS) for part in parts]
    predicted = re.search(r"^TITLE .*(ALPHAFOLD|ESMFOLD).*PREDICTION", "".join(head), re.MULTILINE | re.IGNORECASE)
    models = sum(line.startswith(_MODEL) for line in head)
    return max(models, 1), struc.concatenate(arrays), predicted is not None


def _of_cif(path: Path, file: BinaryIO, section: StructuresSection) -> _Read:
    head, parts = _gathered(_cif_lines(_lines(path, file, section)), path, section)
    columns = "".join(line for line in head if not line.startswith(_PREDICTED))
    if f"\n{_ATOM_SITE}" not in columns:
        raise DataError(f"{path}: an mmCIF file without atoms")
    models: dict[int, None] = {}
    arrays = []
    for part in parts:
        # Lines are Latin-1, of any bytes, and CIF is UTF-8.
        cif = pdbx.CIFFile.read(io.StringIO((columns + part).encode("latin-1").decode()))
        numbers = cif.block["atom_site"]["pdbx_PDB_model_num"].as_array(np.int32)
        models |= dict.fromkeys(numbers.tolist())
        # Models come one after the other, so that a part begins with the first or is of later ones alone.
        if numbers[0] == next(iter(models)):
            arrays.append(pdbx.get_structure(cif, **_FIELDS))
            # NumPy gives each of a million names the room of the longest.
            if max(arrays[-1].get_annotation(name).itemsize for name in _NAMES) > _LONGEST_NAME_BYTES:
                raise DataError(f"{path}: a name of an atom, residue or chain has more than 32 letters; shorten it")
    return len(models), struc.concatenate(arrays), any(line.startswith(_PREDICTED) for line in head)


def _of_binary_cif(path: Path, file: BinaryIO, section: StructuresSection) -> _Read:
    # MessagePack can't be parsed in parts. One byte more than may be says that there is more.
    content = file.read(section.max_bytes + 1)
    if len(content) > section.max_bytes:
        raise _too_large(path, section)

    def bounded(node: dict[str, Any]) -> dict[str, Any]:
        """Refuse an encoding by the length that it says its data will have: of these, a few bytes may say much."""
        if node.get("kind") in ("RunLength", "IntegerPacking"):
            size = node.get("srcSize")
            if not isinstance(size, int) or size > 2 * section.max_atoms:  # of runs, a number and a length each
                raise _too_large(path, section)
        return node

    unpacked = msgpack.unpackb(content, object_hook=bounded, max_array_len=_LONGEST_LIST, max_map_len=_LONGEST_LIST)
    cif = pdbx.BinaryCIFFile.deserialize(unpacked)
    if "atom_site" not in cif.block:
        raise DataError(f"{path}: an mmCIF file without atoms")
    return pdbx.get_model_count(cif), pdbx.get_structure(cif, **_FIELDS), "ma_qa_metric" in cif.block


def _lines(path: Path, file: BinaryIO, section: StructuresSection) -> Iterator[str]:
    """Lines up to the largest size; it is their text that counts, however small the compressed file is."""
    num_bytes = 0
    for line in pieces_of_lines(file, _LONGEST_LINE):
        num_bytes += len(line)
        if num_bytes > section.max_bytes:
            raise _too_large(path, section)
        yield line.removeprefix(BYTE_ORDER_MARK)


def _pdb_lines(lines: Iterator[str]) -> Iterator[tuple[bool, str]]:
    """Titles, models, and the atoms of the first model, which are marked."""
    models = 0
    for line in lines:
        models += line.startswith(_MODEL)
        is_atom = line.startswith(_ATOMS)
        if (is_atom and models < 2) or line.startswith((_MODEL, "TITLE")):
            yield is_atom, line


def _cif_lines(lines: Iterator[str]) -> Iterator[tuple[bool, str]]:
    """Blocks, and the columns and marked rows of the atoms; of the quality of a prediction that it is there."""
    start = ""
    is_row = False
    for line in lines:
        if line.startswith(("loop_", "_", "data_")):
            is_row = line.startswith(_ATOM_SITE)
            if is_row or line.startswith((_PREDICTED, "data_")):
                yield False, start + line if is_row else line
            start = line if line.startswith("loop_") else ""
        elif is_row:
            yield True, line


def _gathered(lines: Iterator[tuple[bool, str]], path: Path, section: StructuresSection) -> tuple[list[str], list[str]]:
    """The lines that are not marked, and those that are as texts of some thousand atoms.

    biotite takes 700 bytes for an atom of PDB and 1,500 for one of mmCIF while it parses, of its arrays 110 remain.
    """
    head: list[str] = []
    parts: list[str] = []
    part: list[str] = []
    for number, (is_marked, line) in enumerate(lines):
        if number > section.max_atoms + _HEAD_LINES:
            raise _too_large(path, section)
        if len(line) > _LONGEST_ROW:
            raise DataError(f"{path}: a line of more than {_LONGEST_ROW} characters: {line[:30]!r} ...; shorten it")
        # Only before an atom: a row of mmCIF may span several lines.
        if is_marked and len(part) >= _PART_LINES and line.startswith(_ATOMS):
            parts.append("".join(part))
            part = []
        (part if is_marked else head).append(line)
    return head, [*parts, "".join(part)]


def _too_large(path: Path, section: StructuresSection) -> DataError:
    return DataError(
        f"{path}: more than {section.max_bytes:,} bytes, uncompressed, or {section.max_atoms:,} atoms; if that is "
        "right, raise data.structures.max_bytes or max_atoms"
    )


def _chain_names(atoms: Any, path: Path) -> list[str]:
    """Chains in the order of the file. Raises DataError where a name stands for two."""
    # Of ligands and water, which stand behind all chains, a second run is as it should be.
    runs = Counter(name for name, _ in groupby(atoms.chain_id[~atoms.hetero].tolist()))
    twice = [name for name, count in runs.items() if count > 1]
    if twice:
        raise DataError(f"{path}: chain {', '.join(sorted(twice))!r} stands twice in the file; rename one of them")
    return list(dict.fromkeys(map(str, atoms.chain_id)))


def _chain(
    atoms: Any, name: str, path: Path, section: StructuresSection, counts: StructureCounts, predicted: bool
) -> Structure | None:
    """The amino acids of a chain, its name as id; None where it has too few, which is counted."""
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
    letters = []
    for three in protein.res_name[starts].tolist():
        # The table first: the dictionary of components takes a while to load, and most files need none of it.
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
    # Counted by residues with coordinates: a peptide of unknown ones is nothing to learn from.
    if whole.sum() < section.min_residues:
        counts.short_chains += 1
        return None
    counts.unknown_residues += letters.count("X")
    counts.incomplete_residues += int((~whole).sum())
    coordinates[~whole] = np.nan  # also what is known of them: models take a residue's frame or nothing
    counts.placed_oxygens += _place_oxygens(coordinates)
    counts.breaks += int((~_bonded(coordinates)).sum())
    return Structure(name, "".join(letters), coordinates, confidence, np.zeros(len(letters), np.int8), (name,))


def _backbone(protein: Any, starts: NDArray, predicted: bool) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """(R, 4, 3) coordinates, NaN where an atom is missing, and (R,) confidence."""
    coordinates = np.full((len(starts), 4, 3), np.nan, dtype=np.float32)
    residue = np.searchsorted(starts, np.arange(len(protein)), side="right") - 1
    for column, atom in enumerate(("N", "CA", "C", "O")):
        here = protein.atom_name == atom
        coordinates[residue[here], column] = protein.coord[here]
    confidence = np.full(len(starts), 100, dtype=np.int8)
    if predicted:
        values = np.nan_to_num(protein.b_factor[starts]).clip(0, 100)
        # Some files of ESMFold have pLDDT from 0 to 1, AlphaFold's from 0 to 100.
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
        coordinates[missing, 3] = bonded_atom(n, ca, c, C_O, CA_C_O, psi + np.pi)
    return int(missing.size)


_STANDARD = {
    **{"ALA": "A", "CYS": "C", "ASP": "D", "GLU": "E", "PHE": "F", "GLY": "G", "HIS": "H", "ILE": "I", "LYS": "K"},
    **{"LEU": "L", "MET": "M", "ASN": "N", "PRO": "P", "GLN": "Q", "ARG": "R", "SER": "S", "THR": "T", "VAL": "V"},
    **{"TRP": "W", "TYR": "Y", "SEC": "U", "PYL": "O", "ASX": "B", "GLX": "Z", "UNK": "X"},
}
