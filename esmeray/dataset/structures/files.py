"""Read atoms from structure files: PDB, mmCIF and BinaryCIF, plain or gzip, recognized by content.

biotite decodes mmCIF and BinaryCIF. Defaults for missing fields and columns are set here, because biotite's readers
refuse files without occupancies, B-factors, insertion codes or models. The atoms of the first model become chains in
:mod:`esmeray.dataset.structures.chains`.

gemmi 0.7.5 reads 918 PDB files in 0.4 s of CPU time; this module takes 4 s. But gemmi has no BinaryCIF reader, reads
coordinates of '*' and blank occupancies as 0, and reads HISE in chain A as HIS in chain EA.

Importing this module loads biotite, in 0.7 s. Dry runs and early errors don't need it, so import this only to read.
"""

import codecs
import gzip
import io
import re
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import biotite.structure as struc
import msgpack
import numpy as np
from biotite.structure.io import pdbx
from biotite.structure.io.pdb.hybrid36 import decode_hybrid36
from numpy.typing import NDArray

from esmeray.common.errors import DataError, first_line, reading
from esmeray.dataset.section import StructuresSection
from esmeray.dataset.structures.chains import FORCE_FIELDS, STANDARD, chain_of
from esmeray.dataset.structures.store import Structure, StructureCounts, packed_number

_MAX_ID_LENGTH = 200
_MAX_CHAINS = 127

_COLUMNS: dict[str, tuple[tuple[str, ...], tuple[int, int] | None, Any]] = {
    "x": (("Cartn_x",), (30, 38), np.nan),
    "y": (("Cartn_y",), (38, 46), np.nan),
    "z": (("Cartn_z",), (46, 54), np.nan),
    "chain_id": (("auth_asym_id", "label_asym_id"), (21, 22), ""),
    "res_id": (("auth_seq_id", "label_seq_id"), (22, 26), 0),
    "ins_code": (("pdbx_PDB_ins_code",), (26, 27), ""),
    "res_name": (("auth_comp_id", "label_comp_id"), (17, 21), ""),
    "atom_name": (("auth_atom_id", "label_atom_id"), (12, 16), ""),
    "altloc_id": (("label_alt_id",), (16, 17), ""),
    "occupancy": (("occupancy",), (54, 60), 1.0),
    "b_factor": (("B_iso_or_equiv",), (60, 66), np.nan),
    "hetero": (("group_PDB", "label_seq_id"), (0, 6), "HETATM"),
    "model": (("pdbx_PDB_model_num",), None, 1),
}
"""For each field of an atom: columns of mmCIF, columns of a PDB line, and the default.

In each row of mmCIF, the first column with a value is used. Without group_PDB, polymer residues are recognized by their
label_seq_id. PDB has models as lines of their own.
"""
_NEEDED = ("x", "y", "z", "res_id", "res_name", "atom_name")
_GZIP = b"\x1f\x8b"
_PART_LINES = 20_000
_MAX_ROW_LENGTH = 500
"""Maximum characters of an atom's line; programs write about 100."""
_PDB_LINE, _COORDINATES_END = 80, 54
"""Columns of a PDB line that are read, and the column of z's last digit: a shorter line is truncated."""
_LONGEST_LIST = 10_000
"""Maximum number of categories, columns or encodings in BinaryCIF; values are bytes, not lists."""


MAX_BYTES = 1_000_000_000
"""Maximum bytes of a file, uncompressed; larger files are refused while reading."""
MAX_ATOMS = 5_000_000
"""Maximum number of atoms read from a file, twice as many as in the largest entry of the PDB."""
_Read: TypeAlias = tuple[int, Any, bool]
"""Number of models, atoms of the first model, and whether it is a prediction."""


def read_structures(
    path: Path, section: StructuresSection, counts: StructureCounts, min_residues: int
) -> list[Structure]:
    """Return the selected chains of a file and update ``counts``. Raises DataError with file and chain."""
    atoms = _read_atoms(path, section, counts)
    counts.files += 1
    # Ligands and water may follow all chains, so a second run of hetero atoms is normal.
    runs = Counter(name for name, _ in groupby(atoms.chain_id[~atoms.hetero].tolist()))
    for name, times in runs.items():
        if times > 1:
            raise DataError(f"{path}: chain {name!r} occurs twice in the file; rename one of them")
    # Read all chains: rules refer to protein chains, and messages list all.
    chains: dict[str, Structure] = {}
    for name in dict.fromkeys(map(str, atoms.chain_id)):
        chain = chain_of(atoms, name, path, section, counts, min_residues)
        if chain is not None:
            chains[name] = chain
    if not chains:
        raise DataError(f"{path}: no protein chain with at least {min_residues} residues that have N, CA and C")
    names = _chosen(path, section.chains, list(chains))
    counts.chains += len(names)
    stem = path.name.removesuffix(".gz").rpartition(".")[0][:_MAX_ID_LENGTH].replace(" ", "_")
    if section.chains == "complex":
        return [_complex(stem, list(chains.values()))]
    return [replace(chains[name], id=f"{stem}_{name}" if name else stem) for name in names]


def _chosen(path: Path, rule: str, names: list[str]) -> list[str]:
    """Return the names of the chains that the setting ``chains`` selects."""
    if rule == "complex" and len(names) > _MAX_CHAINS:
        raise DataError(f"{path}: {len(names)} chains, more than the maximum of {_MAX_CHAINS}")
    by_rule = {"each": names, "complex": names, "first": names[:1]}
    if rule in by_rule:
        return by_rule[rule]
    chosen = list(map(str.strip, rule.split(",")))
    missing = [name for name in chosen if name not in names]
    if missing:
        raise DataError(f"{path}: has no protein chain {', '.join(missing)}; it has {', '.join(names)}")
    return chosen


def _complex(name: str, chains: list[Structure]) -> Structure:
    """Return all chains as one record."""
    lengths = [len(chain.residues) for chain in chains]
    return Structure(
        id=name,
        residues="".join(chain.residues for chain in chains),
        coordinates=np.concatenate([chain.coordinates for chain in chains]),
        confidence=np.concatenate([chain.confidence for chain in chains]),
        chains=np.repeat(np.arange(len(chains), dtype=np.int8), lengths),
        chain_names=tuple(chain.id for chain in chains),
        numbers=np.concatenate([chain.packed_numbers for chain in chains]),
    )


def _read_atoms(path: Path, section: StructuresSection, counts: StructureCounts) -> Any:
    """Return the atoms of the first model, with packed residue numbers and confidences as in a store."""
    try:
        with reading(path), path.open("rb") as raw:
            file: Any = gzip.GzipFile(fileobj=raw) if raw.peek(2).startswith(_GZIP) else raw
            # Read one byte more than the limit, to detect longer files. The limit applies to the uncompressed text.
            content = file.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise _too_large(path)
            # The content decides: names are often wrong, and a download may be a web page or an archive.
            content = content.removeprefix(codecs.BOM_UTF8).lstrip()
            if content.startswith(b"PK"):
                raise DataError(f"{path}: a zip archive; unpack it and give its folder")
            if content.startswith((b"\x82", b"\x83", b"\x84")):
                models, atoms, predicted = _read_binary_cif(path, content)
            elif content[:5].lower().startswith((b"data_", b"#")):
                models, atoms, predicted = _read_cif(path, content)
            else:
                models, atoms, predicted = _read_pdb(path, content)
            numbers = list(map(packed_number, atoms.res_id.tolist(), atoms.ins_code.tolist()))
            atoms.set_annotation("number", np.array(numbers, dtype=np.int32))
    except DataError:
        raise
    # biotite's parsers raise arbitrary Python exceptions for unexpected content.
    except Exception as error:
        raise DataError(f"{path}: damaged or truncated ({first_line(error)})") from error
    counts.other_models += models - 1
    atoms.set_annotation("confidence", _confidence(atoms, path, section, counts, predicted))
    return atoms


def _confidence(
    atoms: Any, path: Path, section: StructuresSection, counts: StructureCounts, titled: bool
) -> NDArray[np.float64]:
    """Return (atoms,) confidence, 0 to 100: the B-factors of a prediction, or 100 for a measured structure."""
    values = np.nan_to_num(atoms.b_factor.astype(np.float64))
    if section.predicted is True or (section.predicted == "auto" and titled and values.any()):
        if not 0 <= values.min() <= values.max() <= 100 or not values.any():
            raise DataError(
                f"{path}: no confidence: its B-factors are missing, or range from {values.min():g} to "
                f"{values.max():g} instead of 0 to 100; leave the file out, or set data.structures.predicted to "
                "false to use all coordinates"
            )
        counts.predicted += 1
        # Some files of ESMFold and OmegaFold have pLDDT from 0 to 1, AlphaFold's files from 0 to 100.
        return values * 100 if values.max() <= 1 else values
    # Refinement assigns a B-factor per atom, predictors one per residue.
    starts = struc.get_residue_starts(atoms)
    is_same = np.array_equal(np.maximum.reduceat(values, starts), np.minimum.reduceat(values, starts))
    if section.predicted == "auto" and is_same and len(values) > 2 * len(starts) and np.ptp(values) > 0:
        counts.like_predictions += 1
    return np.full(len(values), 100.0)


def _read_pdb(path: Path, content: bytes) -> _Read:
    models = 0
    atoms: list[bytes] = []
    for line in io.BytesIO(content):
        models += line.startswith(b"MODEL")
        if models < 2 and line.startswith((b"ATOM", b"HETATM")):
            atoms.append(line.rstrip())
        if len(atoms) > MAX_ATOMS:
            raise _too_large(path)
    if not atoms:
        raise DataError(f"{path}: not a PDB, mmCIF or BinaryCIF file: it has no atoms")
    if min(map(len, atoms)) < _COORDINATES_END:
        raise ValueError("a line ends before its coordinates")
    # One byte per character, so that a column of all lines is read at once.
    grid = np.array(atoms, dtype=f"S{_PDB_LINE}").view("S1").reshape(len(atoms), _PDB_LINE)

    def column(first: int, end: int) -> NDArray[np.str_]:
        texts = np.ascontiguousarray(grid[:, first:end]).view(f"S{end - first}")[:, 0]
        return np.char.strip(np.char.decode(texts, "latin-1"))

    fields: dict[str, NDArray] = {field: column(*span) for field, (_, span, _) in _COLUMNS.items() if span}
    # Column 21 is the fourth letter of a force field's name (HISE), or the first letter of the chain: ALA in chain AB.
    names = np.unique(fields["res_name"]).tolist()
    if any(name[3:] and name[:3] in STANDARD and name not in FORCE_FIELDS for name in names):
        fields |= {"res_name": column(17, 20), "chain_id": column(20, 22)}
    # Numbers above 9999 contain letters.
    numbers, residue_n = np.unique(fields["res_id"], return_inverse=True)
    fields["res_id"] = np.array([str(decode_hybrid36(number)) for number in numbers.tolist()])[residue_n]
    predicted = re.search(rb"^TITLE +(ALPHAFOLD|ESMFOLD)\b.*PREDICTION", content, re.MULTILINE | re.IGNORECASE)
    return max(models, 1), _atoms(path, fields), predicted is not None


def _read_cif(path: Path, content: bytes) -> _Read:
    columns: list[bytes] = []
    rows: list[bytes] = []
    is_row = predicted = False
    for line in io.BytesIO(content):
        # Keywords and names are case-insensitive.
        name = line.strip().lower()
        if name.startswith((b"loop_", b"_", b"data_", b"stop_", b"save_")):
            name = name.removeprefix(b"loop_").lstrip()
            is_row = name.startswith(b"_atom_site.")
            predicted |= name.startswith(b"_ma_qa_metric.")
            if is_row:
                columns.append(name)
        elif is_row and name and not name.startswith(b"#"):
            rows.append(line.rstrip())
        if len(rows) > MAX_ATOMS:
            raise _too_large(path)
    if not columns or not rows:
        raise DataError(f"{path}: an mmCIF file without atoms")
    if len(set(columns)) < len(columns):
        raise DataError(f"{path}: several data blocks have atoms; save each in a separate file")
    longest = max(rows, key=len)
    if len(longest) > _MAX_ROW_LENGTH:
        raise DataError(f"{path}: a line has more than {_MAX_ROW_LENGTH} characters: {longest[:30]!r} ...; shorten it")
    # Parse in parts: biotite needs 1,500 bytes per atom for parsing, its arrays 110. Rows that span lines stay whole.
    size = _PART_LINES if all(len(row.split()) == len(columns) for row in rows) else len(rows)
    parts = []
    for start in range(0, len(rows), size):
        text = b"\n".join([b"data_", b"loop_", *columns, *rows[start : start + size], b""]).decode()
        parts.append(_of_columns(path, pdbx.CIFFile.read(io.StringIO(text)).block["atom_site"]))
    return _first_model(struc.concatenate(parts), predicted)


def _first_model(atoms: Any, predicted: bool) -> _Read:
    return len(np.unique(atoms.model)), atoms[atoms.model == atoms.model[0]], predicted


def _of_columns(path: Path, rows: Any) -> Any:
    """Return the atoms of mmCIF's atom_site. Raises DataError if a column without a default is missing."""
    names = {name.lower(): name for name in rows}
    fields = {}
    for field, (columns, _, _) in _COLUMNS.items():
        known = [names[column.lower()] for column in columns if column.lower() in names]
        if field in _NEEDED and not known:
            raise DataError(f"{path}: its atoms have no {' or '.join(columns)}; save it with that column")
        # '.' and '?' are masked: another column of the row gives the value, otherwise the default.
        fields[field] = np.full(rows.row_count, "")
        for column in reversed(known):
            texts = rows[column].as_array(str, masked_value="")
            fields[field] = np.where(texts == "", fields[field], texts)
    return _atoms(path, fields)


def _atoms(path: Path, texts: dict[str, NDArray[np.str_]]) -> Any:
    defaults = {field: _COLUMNS[field][2] for field in texts}
    typed: dict[str, NDArray] = {
        field: np.where(values == "", str(defaults[field]), values).astype(type(defaults[field]))
        for field, values in texts.items()
    }
    # NumPy pads every string to the longest, at four bytes per letter, so one long name would fill memory.
    if max(values.itemsize for values in typed.values()) > 4 * 32:
        raise DataError(f"{path}: the name of an atom, residue or chain has more than 32 characters; shorten it")
    atoms = struc.AtomArray(len(typed["x"]))
    atoms.coord = np.stack([typed.pop(axis) for axis in "xyz"], axis=1)
    typed["hetero"] = typed["hetero"] == "HETATM"
    for field, values in typed.items():
        atoms.set_annotation(field, values)
    return atoms


def _read_binary_cif(path: Path, content: bytes) -> _Read:
    def bounded(node: dict[str, Any]) -> dict[str, Any]:
        """Refuse an encoding by its declared length: a few bytes may declare gigabytes of data."""
        if node.get("kind") in ("RunLength", "IntegerPacking"):
            size = node.get("srcSize")
            if not isinstance(size, int) or size > 2 * MAX_ATOMS:  # run-length: a value and a length per run
                raise _too_large(path)
        return node

    unpacked = msgpack.unpackb(content, object_hook=bounded, max_array_len=_LONGEST_LIST, max_map_len=_LONGEST_LIST)
    block = pdbx.BinaryCIFFile.deserialize(unpacked).block
    if "atom_site" not in block:
        raise DataError(f"{path}: an mmCIF file without atoms")
    return _first_model(_of_columns(path, block["atom_site"]), "ma_qa_metric" in block)


def _too_large(path: Path) -> DataError:
    return DataError(f"{path}: more than {MAX_BYTES:,} bytes, uncompressed, or {MAX_ATOMS:,} atoms: is it a structure?")
