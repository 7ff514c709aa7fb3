"""Structure files as programs write them: conformers, force field names, missing columns, confidences and numbers."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from biotite.structure.io import pdbx
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.common.errors import DataError
from esmeray.dataset.structures.files import read_structures
from esmeray.dataset.structures.store import Structure, StructureCounts
from tests.structures import EACH, THREE, folds

FOLD = folds(1)[0]
NAMES = ("N", "CA", "C", "O")
IDENTIFIERS = st.sampled_from([*"ABZa19*+-"])
OCCUPANCIES = st.sampled_from([0.0, 0.2, 0.35, 0.5, 0.65, 1.0])


@dataclass(frozen=True)
class Atom:
    """An atom of a file; ``number`` is the residue number."""

    name: str
    residue: str
    number: int
    position: tuple[float, float, float]
    altloc: str = ""
    occupancy: float | None = 1.0
    insertion_code: str = ""
    chain: str = "A"
    b_factor: float | None = 20.0
    record: str = "ATOM"


def residue(index: int, three: str = "", number: int | None = None, shift: float = 0.0, **fields) -> list[Atom]:
    """Backbone atoms of a residue of the fold, shifted along x by ``shift``."""
    three = three or THREE[FOLD.residues[index]]
    positions = (FOLD.coordinates[index] + np.array([shift, 0, 0])).round(3).tolist()
    return [
        Atom(name, three, index + 1 if number is None else number, tuple(position), **fields)
        for name, position in zip(NAMES, positions, strict=True)
    ]


def pdb_text(atoms: Iterable[Atom]) -> str:
    lines = []
    for serial, atom in enumerate(atoms, 1):
        x, y, z = atom.position
        occupancy = "" if atom.occupancy is None else f"{atom.occupancy:6.2f}"
        b_factor = "" if atom.b_factor is None else f"{atom.b_factor:6.2f}"
        lines.append(
            f"{atom.record:<6}{serial % 100000:>5}  {atom.name:<3}{atom.altloc:1}{atom.residue:<4}{atom.chain:1}"
            f"{atom.number:>4}{atom.insertion_code:1}   {x:8.3f}{y:8.3f}{z:8.3f}{occupancy:>6}{b_factor:>6}".rstrip()
        )
    return "\n".join([*lines, "END", ""])


COLUMNS = {
    "group_PDB": lambda atom: atom.record,
    "type_symbol": lambda atom: atom.name[0],
    "label_atom_id": lambda atom: atom.name,
    "label_alt_id": lambda atom: atom.altloc or ".",
    "label_comp_id": lambda atom: atom.residue,
    "label_asym_id": lambda atom: atom.chain,
    "label_entity_id": lambda atom: "1",
    "label_seq_id": lambda atom: str(atom.number),
    "pdbx_PDB_ins_code": lambda atom: atom.insertion_code or "?",
    "Cartn_x": lambda atom: f"{atom.position[0]:.3f}",
    "Cartn_y": lambda atom: f"{atom.position[1]:.3f}",
    "Cartn_z": lambda atom: f"{atom.position[2]:.3f}",
    "occupancy": lambda atom: "?" if atom.occupancy is None else f"{atom.occupancy:.2f}",
    "B_iso_or_equiv": lambda atom: "?" if atom.b_factor is None else f"{atom.b_factor:.2f}",
    "auth_seq_id": lambda atom: str(atom.number),
    "auth_comp_id": lambda atom: atom.residue,
    "auth_asym_id": lambda atom: atom.chain,
    "auth_atom_id": lambda atom: atom.name,
    "pdbx_PDB_model_num": lambda atom: "1",
}
NEITHER = ({"label_seq_id", "auth_seq_id"}, {"label_comp_id", "auth_comp_id"}, {"label_atom_id", "auth_atom_id"})
"""Pairs of columns; one of each is needed."""


def cif_text(atoms: Iterable[Atom], columns: Iterable[str] = COLUMNS) -> str:
    columns = list(columns)
    rows = [" ".join(COLUMNS[column](atom) for column in columns) for atom in atoms]
    return "\n".join(["data_x", "#", "loop_", *(f"_atom_site.{column}" for column in columns), *rows, "#", ""])


def bcif_bytes(atoms: Iterable[Atom], columns: Iterable[str] = COLUMNS) -> bytes:
    atoms = list(atoms)
    category = {}
    for column in columns:
        values = np.array([COLUMNS[column](atom) for atom in atoms])
        mask = np.select([values == ".", values == "?"], [1, 2], 0).astype(np.uint8)
        numeric = column.startswith("Cartn") or column in ("occupancy", "B_iso_or_equiv")
        data = np.where(mask > 0, "0", values).astype(np.float32) if numeric else values
        if column in ("label_seq_id", "auth_seq_id", "pdbx_PDB_model_num"):
            data = values.astype(np.int32)
        category[column] = pdbx.BinaryCIFColumn(data, mask if mask.any() else None)
    block = pdbx.BinaryCIFBlock({"atom_site": pdbx.BinaryCIFCategory(category)})
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.bcif"
        pdbx.BinaryCIFFile({"x": block}).write(path)
        return path.read_bytes()


WRITERS = {"pdb": pdb_text, "cif": cif_text, "bcif": bcif_bytes}


def read_all(content: str | bytes, name: str = "x", **given: object) -> tuple[list[Structure], StructureCounts]:
    counts = StructureCounts()
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("latin-1"))
        return read_structures(path, EACH.model_copy(update=given), counts, min_residues=1), counts


def read(content: str | bytes, **given: object) -> tuple[Structure, StructureCounts]:
    (structure,), counts = read_all(content, **given)
    return structure, counts


@st.composite
def conformers(draw) -> tuple[list[Atom], str, float]:
    """Draw atoms of residue 3 in several conformers; also the amino acid and the shift of the expected conformer."""
    alternates = []
    identifiers = draw(st.lists(IDENTIFIERS, min_size=1, max_size=4, unique=True))
    shared = draw(st.sampled_from([(), ("O",), ("N",), ("N", "CA", "C", "O")]))
    three = draw(st.sampled_from(["ALA", "TRP", "GLY"]))
    micro = not shared and draw(st.booleans())
    for number, identifier in enumerate(identifiers):
        kind = ["SER", "GLY", "TRP", "MSE"][number] if micro else three
        missing = draw(st.sampled_from([(), (), ("N",), ("C",), ("O",)]))
        occupancy = draw(OCCUPANCIES)
        atoms = residue(2, kind, shift=float(number + 1), altloc=identifier, occupancy=occupancy)
        own = [atom for atom in atoms if atom.name not in (*missing, *shared)]
        # A large side chain, which must not affect the choice.
        own += [Atom("CB", kind, 3, (9, 9, number), identifier, occupancy)] * draw(st.integers(0, 3))
        alternates.append((kind, occupancy, {atom.name for atom in own}, own))
    common = [atom for atom in residue(2, three) if atom.name in shared]
    atoms = [atom for *_, own in alternates for atom in own]
    if draw(st.booleans()):  # interleaved by atom, as in the PDB's files
        order = {name: index for index, name in enumerate((*NAMES, "CB"))}
        atoms.sort(key=lambda atom: order[atom.name])
    backbones = []
    for number, (kind, occupancy, names, own) in enumerate(alternates):
        given = [1.0 if name in shared else occupancy for name in NAMES[:3] if name in names or name in shared]
        if own:
            # The first in the file on a tie.
            mean = round(sum(given) / max(1, len(given)), 6)
            backbones.append((len(given), mean, -atoms.index(own[0]), number, kind))
    if not backbones:
        return residue(2, three), three, 0.0
    *_, number, kind = max(backbones)
    return [*common, *atoms], kind, 1.0 + number if "CA" not in shared else 0.0


@settings(max_examples=120, deadline=None)
@given(conformers(), st.sampled_from(["pdb", "cif", "bcif"]))
def test_the_conformer_of_highest_backbone_occupancy_is_taken(made, kind: str):
    atoms, three, shift = made
    atoms = [*residue(0), *residue(1), *atoms, *residue(3)]
    structure, _ = read(WRITERS[kind](atoms))
    letters = {"MSE": "M", **{name: letter for letter, name in THREE.items()}}
    assert structure.residues == FOLD.residues[:2] + letters[three] + FOLD.residues[3]
    assert structure.residue_labels == ["1", "2", "3", "4"]
    if np.isfinite(structure.coordinates[2]).all():
        np.testing.assert_allclose(structure.coordinates[2, 1], FOLD.coordinates[2, 1] + [shift, 0, 0], atol=2e-3)


def test_alternates_behind_the_chain_belong_to_their_residue():
    first = [atom for index in range(4) for atom in residue(index, altloc="A" if index == 2 else "", occupancy=0.4)]
    structure, counts = read(pdb_text([*first, *residue(2, shift=1.0, altloc="B", occupancy=0.6)]))
    assert structure.residues == FOLD.residues[:4] and counts.alternate_atoms == 4
    np.testing.assert_allclose(structure.coordinates[2, 0], FOLD.coordinates[2, 0] + [1, 0, 0], atol=2e-3)
    side_chains = [Atom("CB", "ALA", 3, (9, 9, 9), altloc, 0.5) for altloc in "AB"]
    structure, counts = read(pdb_text([*residue(1), *residue(2, "ALA"), *side_chains]))
    assert structure.residues == FOLD.residues[1] + "A" and counts.alternate_atoms == 1
    with pytest.raises(DataError, match="chain 'A' has 2 residues 3;"):
        read(pdb_text([*residue(1), *residue(2, "SER"), *residue(2, "GLY"), *residue(3)]))
    with pytest.raises(DataError, match="chain 'A' has 2 residues 1;"):
        read(pdb_text([*residue(0, occupancy=0.3), *residue(0, shift=1.0, occupancy=0.7), *residue(1)]))


FORCE_FIELDS = {
    "H": "HIE HID HIP HSD HSE HSP HSC HISD HISE HISH HISA HISB HIS1 NHIE CHIP CHID NHIS CHIS",
    "C": "CYX CYM CYN CYD CYS- CYS1 CYS2 CYSH NCYX CCYS NCYS CCYX",
    "D": "ASP- ASH ASPH ASPP NASP CASP AS4",
    "E": "GLU- GLH GLUH GLUP NGLU CGLU GL4",
    "K": "LYS+ LYN LYP LSN LYSH NLYS CLYS NLYN",
    "R": "ARG+ ARN ARGN NARG CARG RN1",
    "Y": "TYM TYRU NTYR CTYR",
    "S": "NSER CSER SERD",
    "M": "MSE NMET CMET",
    "A": "NALA CALA",
    "G": "NGLY CGLY",
    "P": "NPRO CPRO",
}


@pytest.mark.parametrize("kind", ["pdb", "cif", "bcif"])
def test_names_of_force_fields_are_read_as_the_residue(kind: str):
    names = [(letter, name) for letter, names in FORCE_FIELDS.items() for name in names.split()]
    atoms = [atom for index, (_, name) in enumerate(names) for atom in residue(index, name)]
    structure, counts = read(WRITERS[kind](atoms))
    assert structure.residues == "".join(letter for letter, _ in names)
    assert (counts.renamed_residues, counts.modified_residues) == (len(names) - 1, 1)


def test_molecules_named_as_in_a_force_field_follow_the_dictionary():
    homoserine = [*residue(1, "HSE"), Atom("C3", "HSE", 2, (9, 9, 9)), Atom("O3", "HSE", 2, (9, 9, 9))]
    cyanide = [Atom(name, "CYN", 90, (1, 1, 1), record="HETATM") for name in "CN"]
    assert read(pdb_text([*residue(0), *homoserine, *residue(2), *cyanide]))[0].residues == (
        FOLD.residues[0] + "S" + FOLD.residues[2]
    )


def test_chains_of_two_letters_are_no_names_of_force_fields():
    lines = pdb_text([*residue(0), *residue(1), *residue(2)]).splitlines()
    both = [line[:20] + name + line[21:] for name in "XY" for line in lines[:-1]]
    found, _ = read_all("\n".join(both), "x.pdb")
    assert [(each.id, each.residues) for each in found] == [(f"x_{name}A", FOLD.residues[:3]) for name in "XY"]


def test_many_chains_are_read_but_are_no_complex():
    text = cif_text(atom for number in range(130) for atom in residue(0, chain=f"C{number}"))
    assert len(read_all(text)[0]) == 130
    with pytest.raises(DataError, match="130 chains, more than the maximum of 127"):
        read_all(text, chains="complex")


OPTIONAL = [column for column in COLUMNS if not column.startswith("Cartn")]


@settings(max_examples=80, deadline=None)
@given(st.sets(st.sampled_from(OPTIONAL)), st.permutations(list(COLUMNS)), st.sampled_from(["cif", "bcif"]))
def test_columns_of_mmcif_may_be_missing_and_stand_in_any_order(missing: set, order: list, kind: str):
    columns = [column for column in order if column not in missing]
    atoms = [atom for index in range(4) for atom in residue(index)]
    content = WRITERS[kind](atoms, columns)
    if any(pair <= missing for pair in NEITHER):
        with pytest.raises(DataError, match="its atoms have no auth_"):
            read(content)
        return
    structure, _ = read(content)
    assert (structure.residues, structure.residue_labels) == (FOLD.residues[:4], ["1", "2", "3", "4"])
    np.testing.assert_allclose(structure.coordinates, FOLD.coordinates[:4], atol=2e-3)
    if "B_iso_or_equiv" in missing:
        with pytest.raises(DataError, match="x: no confidence"):
            read(content, predicted=True)
    else:
        assert read(content, predicted=True)[0].confidence.tolist() == [20] * 4


def test_missing_mmcif_values_fall_back_to_other_columns():
    atoms = [atom for index in range(4) for atom in residue(index, occupancy=None, b_factor=None)]
    water = Atom("O", "HOH", 99, (1, 1, 1), record="HETATM")
    other = [atom for index in range(4) for atom in residue(index, chain="B", shift=50.0)]
    text = cif_text([*atoms, *other, water], [column for column in COLUMNS if column != "group_PDB"])
    found, _ = read_all(text.replace(" HOH A 1 99 ", " HOH A 1 . "), "x.cif")
    assert [(each.id, each.residues) for each in found] == [("x_A", FOLD.residues[:4]), ("x_B", FOLD.residues[:4])]


def test_blank_occupancies_are_read():
    text = pdb_text(atom for index in range(4) for atom in residue(index, occupancy=None, b_factor=None))
    assert read(text)[0].residues == FOLD.residues[:4]


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_declared_predictions_have_the_confidence_of_their_b_factors(scale: float):
    text = pdb_text(atom for index in range(4) for atom in residue(index, b_factor=(35.5 + index) * scale))
    confidence = read(text, predicted=True)[0].confidence
    np.testing.assert_allclose(confidence, [35.5, 36.5, 37.5, 38.5], atol=0.51 if scale < 1 else 0)
    measured, counts = read(f"TITLE     CRYSTAL STRUCTURE OF A PREDICTED HYDROLASE\n{text}")
    assert set(measured.confidence) == {100} and (counts.predicted, counts.like_predictions) == (0, 1)


@pytest.mark.parametrize("b_factor", [None, 0.0, 120.0, -3.0])
def test_b_factors_of_predictions_that_are_no_confidences_are_refused(b_factor: float | None):
    atoms = [atom for index in range(4) for atom in residue(index, b_factor=b_factor)]
    for content in (pdb_text(atoms), cif_text(atoms), bcif_bytes(atoms)):
        with pytest.raises(DataError, match=r"no confidence.*set data\.structures\.predicted to false"):
            read(content, predicted=True)
        assert set(read(content)[0].confidence) == {100}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-99, 999), st.sampled_from(["", "", "A", "B", "z"])), min_size=4, unique=True),
    st.sampled_from(["pdb", "cif", "bcif"]),
)
def test_residue_numbers_are_those_of_the_file(labels: list[tuple[int, str]], kind: str):
    atoms = [
        atom
        for index, (number, code) in enumerate(labels)
        for atom in residue(index % len(FOLD.residues), number=number, insertion_code=code)
    ]
    structure, _ = read(WRITERS[kind](atoms))
    assert structure.residue_labels == [f"{number}{code}" for number, code in labels]


FIELD = {
    **dict.fromkeys(["digit.pdb", "digit.cif", "digit_all.pdb", "icodes.pdb"], "ACDEFGHIKLMNPQRSTVWY"),
    **{"micro_big.pdb": "ACDEFGHGKLMNPQRSTVWY", "md.pdb": "HHHHHHCCDEKAAAAAAAAA", "gaps.pdb": "ACDEFGHIKPQRSTVWY"},
}


def test_files_as_people_have_them_are_read_right(shared_data: Path):
    folder = shared_data.parent / "field" / "structures"
    if not folder.is_dir():
        pytest.skip(f"the files as people have them are not at {folder}")
    optional = {path.name: "ACDEFGHIKLMNPQRSTVWY" for path in folder.glob("no*.cif")}
    assert len(optional) > 6
    for name, residues in (FIELD | optional).items():
        assert read((folder / name).read_bytes())[0].residues == residues, name
    for name, altloc in {"alt_trunc.pdb": "B", "alt_noN.pdb": "A"}.items():
        content = (folder / name).read_text()
        (wanted,) = (line[30:54].split() for line in content.splitlines() if line[12:17] == f" CA {altloc}")
        np.testing.assert_allclose(read(content)[0].coordinates[7, 1], np.array(wanted, float))
    for name, predicted in {"colabfold.pdb": True, "alphafold.pdb": "auto"}.items():
        structure, counts = read((folder / name).read_bytes(), predicted=predicted)
        assert set(structure.confidence) == {35.5} and counts.predicted == 1
