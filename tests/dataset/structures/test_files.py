"""Structure files become chains; gaps are filled and counted, or the file is refused in one line."""

import gzip
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest

from esmeray.common.errors import DataError
from esmeray.dataset.structures import files
from esmeray.dataset.structures.chains import completed
from esmeray.dataset.structures.files import read_structures
from esmeray.dataset.structures.store import Structure, StructureCounts
from tests.structures import EACH, folds, pdb_lines, write_models, write_pdb

FOLD = folds(1)[0]


def read(path: Path, min_residues: int = 10, **settings: object) -> tuple[list[Structure], StructureCounts]:
    counts = StructureCounts()
    return read_structures(path, EACH.model_copy(update=settings), counts, min_residues), counts


def test_missing_oxygens_are_placed_where_they_were(tmp_path: Path):
    without = FOLD.coordinates.copy()
    without[:, 3] = np.nan
    path = write_pdb(tmp_path / "fold.pdb", pdb_lines(replace(FOLD, coordinates=without)))
    (found,), counts = read(path)
    assert counts.placed_oxygens == len(FOLD.residues)
    np.testing.assert_allclose(found.coordinates[:-1], FOLD.coordinates[:-1], atol=0.05)


def test_an_incomplete_residue_keeps_its_letter(tmp_path: Path):
    coordinates = FOLD.coordinates.copy()
    coordinates[5, 0] = np.nan
    lines = [line for line in pdb_lines(replace(FOLD, coordinates=coordinates)) if line[22:26] not in ("  10", "  11")]
    lines = [line[:30] + "     nan" + line[38:] if line[22:26] == "  15" else line for line in lines]
    (found,), counts = read(write_pdb(tmp_path / "fold.pdb", lines))
    assert found.residues == FOLD.residues[:9] + FOLD.residues[11:]
    assert np.isnan(found.coordinates).all((1, 2)).nonzero()[0].tolist() == [5, 12]
    assert (counts.incomplete_residues, counts.breaks) == (2, 5)


def test_chains_are_chosen_by_rule(tmp_path: Path):
    other = folds(2)[1]
    moved = replace(other, coordinates=other.coordinates + 30)
    path = write_pdb(tmp_path / "two.pdb", pdb_lines(FOLD, "A"), pdb_lines(moved, "B"))
    names = {rule: [each.id for each in read(path, chains=rule)[0]] for rule in ("each", "first", "B", "B,A")}
    assert names == {"each": ["two_A", "two_B"], "first": ["two_A"], "B": ["two_B"], "B,A": ["two_B", "two_A"]}
    (both,), _ = read(path, chains="complex")
    assert (both.id, both.residues, both.chain_names) == ("two", FOLD.residues + other.residues, ("A", "B"))
    assert np.bincount(both.chains).tolist() == [len(FOLD.residues), len(other.residues)]
    with pytest.raises(DataError, match="has no protein chain C; it has A, B"):
        read(path, chains="C")


def test_chains_of_ca_alone_may_be_left_out(tmp_path: Path):
    path = write_pdb(tmp_path / "ca.pdb", [line for line in pdb_lines(FOLD) if line[12:16].strip() == "CA"])
    with pytest.raises(DataError, match="no protein chain"):
        read(path, ca_only="skip")


def test_a_residue_that_no_dictionary_has_is_read_as_x(tmp_path: Path):
    lines = [line[:17] + "ZZZ" + line[20:] if line[22:26] == "   9" else line for line in pdb_lines(FOLD)]
    ion = "HETATM 9999 CA    CA A 900    " + lines[-1][30:54] + "  1.00 20.00          CA"
    (found,), counts = read(write_pdb(tmp_path / "fold.pdb", [*lines, ion]))
    assert found.residues == FOLD.residues[:8] + "X" + FOLD.residues[9:]
    assert (counts.unknown_residues, counts.modified_residues, counts.breaks) == (1, 0, 0)


@pytest.mark.parametrize("suffix", [".pdb", ".cif"])
def test_a_file_that_is_parsed_in_parts_reads_the_same(tmp_path: Path, monkeypatch, suffix: str):
    path = write_models(tmp_path / "fold.cif", pdb_lines(FOLD), 2)
    if suffix == ".pdb":
        model = [*pdb_lines(FOLD), "ENDMDL"]
        path = write_pdb(tmp_path / "fold.pdb", ["MODEL        1", *model], ["MODEL        2", *model])
    (whole,), counts = read(path)
    monkeypatch.setattr(files, "_PART_LINES", 10)
    (of_parts,), counts_of_parts = read(path)
    assert of_parts.residues == whole.residues == FOLD.residues and counts_of_parts == counts
    assert counts.other_models == 1
    np.testing.assert_array_equal(of_parts.coordinates, whole.coordinates)


@pytest.mark.parametrize("bound", ["MAX_BYTES", "MAX_ATOMS"])
@pytest.mark.parametrize("suffix", [".pdb", ".cif", ".bcif"])
def test_a_file_beyond_a_bound_is_refused_before_it_is_parsed(tmp_path: Path, suffix: str, bound: str, monkeypatch):
    path = write_models(tmp_path / f"fold{suffix}", pdb_lines(FOLD))
    size = {"MAX_BYTES": path.stat().st_size, "MAX_ATOMS": 4 * len(FOLD.residues)}[bound]
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    monkeypatch.setattr(files, bound, size)
    assert read(packed)[0][0].residues == FOLD.residues
    monkeypatch.setattr(files, bound, size // 5)
    with pytest.raises(DataError, match=r"packed\.gz: more than .* atoms: is it a structure\?"):
        read(packed)


def test_a_length_that_binary_cif_claims_is_no_room_that_it_gets(tmp_path: Path):
    content = write_models(tmp_path / "fold.bcif", pdb_lines(FOLD)).read_bytes()
    unpacked = msgpack.unpackb(content)
    (categories,) = (block["categories"] for block in unpacked["dataBlocks"])
    (atoms,) = (category for category in categories if category["name"] == "_atom_site")
    used = [column for column in atoms["columns"] if column["name"] in ("auth_seq_id", "pdbx_PDB_model_num")]
    encodings = [encoding for column in used for encoding in column["data"]["encoding"]]
    runs = next(encoding for encoding in encodings if encoding["kind"] == "RunLength")
    for size in (2**31 - 1, 2**63 - 1, -1, None, "1"):
        runs["srcSize"] = size
        (tmp_path / "in.bcif").write_bytes(msgpack.packb(unpacked))
        with pytest.raises(DataError, match=r"more than|damaged"):
            read(tmp_path / "in.bcif")


@pytest.mark.parametrize("name", ["1A8O.pdb", "1A8O.cif", "1LCD.pdb", "2BEG.pdb", "3JQH.cif"])
def test_real_files_are_read_as_gemmi_reads_them(shared_data: Path, name: str):
    import gemmi

    path = shared_data / "structures" / name
    found, counts = read(path, min_residues=1)
    structure = gemmi.read_structure(str(path))
    structure.setup_entities()
    assert counts.other_models == len(structure) - 1
    wanted = {chain.name: chain.get_polymer() for chain in structure[0]}
    wanted = {key: part for key, part in wanted.items() if part.check_polymer_type() == gemmi.PolymerType.PeptideL}
    assert [each.chain_names[0] for each in found] == list(wanted)
    for each in found:
        residues = list(wanted[each.chain_names[0]].first_conformer())
        letters = [gemmi.find_tabulated_residue(residue.name).one_letter_code.upper() for residue in residues]
        assert each.residues == "".join(letter if letter.strip() else "X" for letter in letters)
        for residue, atoms in zip(residues, each.coordinates, strict=True):
            wanted_CA = [atom.pos.tolist() for atom in residue if atom.name == "CA" and atom.altloc in ("\0", "A")]
            if np.isfinite(atoms[1]).all() and wanted_CA and residue.het_flag != "H":
                assert min(np.linalg.norm(np.array(position) - atoms[1]) for position in wanted_CA) < 1.0


def rmsd(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """RMSD per backbone atom, over the residues with known coordinates."""
    known = np.isfinite(found + wanted).all((1, 2))
    return np.sqrt(np.square(found - wanted)[known].sum(-1).mean(0))


def test_real_backbones_are_rebuilt_from_their_ca(shared_data: Path):
    pairs = []
    for path in sorted((shared_data / "structures" / "test").glob("*.pdb.gz"))[::4]:
        pairs += [(completed(each.coordinates[:, 1]), each.coordinates) for each in read(path)[0]]
    found, wanted = (np.concatenate(each) for each in zip(*pairs, strict=True))
    n, ca, c, o = rmsd(found, wanted)
    assert len(found) > 3000 and np.isfinite(found).all((1, 2)).mean() > 0.98
    assert n < 0.25 and ca == 0 and c < 0.3 and o < 0.95, (n, c, o)
    bonds = np.linalg.norm(found[:, [1, 2, 2]] - found[:, [0, 1, 3]], axis=-1)  # N-CA, CA-C, C-O
    np.testing.assert_allclose(np.nanmean(bonds, axis=0), (1.46, 1.52, 1.23), atol=0.02)


def test_what_has_too_few_neighbours_stays_unknown():
    ca = np.arange(12, dtype=np.float32).reshape(4, 3) * 5
    for few in (ca, ca[:0], folds(1)[0].coordinates[:3, 1], np.zeros((5, 3), np.float32)):
        found = completed(few)
        np.testing.assert_array_equal(found[:, 1], few)
        assert np.isnan(found[:, [0, 2, 3]]).all()
