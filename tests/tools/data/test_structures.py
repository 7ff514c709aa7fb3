"""``esmeray data structures`` detects a file's format by its content, or refuses it in one line and leaves no files."""

import gzip
import io
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from esmeray.dataset.structures.store import StructureStore
from tests.structures import folds, pdb_lines, write_pdb

FOLD = folds(1)[0]
LINES = pdb_lines(FOLD)
PDB = "\n".join([*LINES, "TER", "END", ""]).encode()


def renamed(residue: str, record: str = "ATOM") -> bytes:
    return "\n".join(line[:17] + residue + line[20:] for line in pdb_lines(FOLD, record=record)).encode()


def mmcif(binary: bool = False) -> bytes:
    from biotite.structure.io import pdb, pdbx

    file = pdbx.BinaryCIFFile() if binary else pdbx.CIFFile()
    pdbx.set_structure(file, pdb.PDBFile.read(io.StringIO(PDB.decode())).get_structure(model=1))
    written: io.BytesIO | io.StringIO = io.BytesIO() if binary else io.StringIO()
    file.write(written)
    content = written.getvalue()
    return content if isinstance(content, bytes) else content.encode()


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("fold.pdb", PDB)
    return file.getvalue()


NO_ATOMS, NO_CHAIN, DAMAGED = "it has no atoms", "no protein chain", "damaged or truncated"
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty.pdb": (lambda: b"", NO_ATOMS),
    "header.pdb": (lambda: b"HEADER    nothing here\nEND\n", NO_ATOMS),
    "header.cif": (lambda: b"data_X\n_entry.id X\n", "an mmCIF file without atoms"),
    "archive.pdb": (zipped, "a zip archive"),
    "cut.pdb": (lambda: PDB[: PDB.rindex(b"ATOM") + 45], DAMAGED),
    "cut.cif": (lambda: mmcif()[:-40], DAMAGED),
    "cut.pdb.gz": (lambda: gzip.compress(PDB)[:-20], DAMAGED),
    "blocks.cif": (lambda: mmcif() + mmcif(), "several data blocks have atoms"),
    "bytes.bcif": (lambda: b"\x83\xa7version\xff\xff", DAMAGED),
    "stars.pdb": (
        lambda: PDB.replace(LINES[9].encode(), f"{LINES[9][:30]}{24 * '*'}{LINES[9][54:]}".encode()),
        DAMAGED,
    ),
    "ligand.pdb": (lambda: renamed("ATP", "HETATM").replace(b" CA ", b" PA "), NO_CHAIN),
    "ca.pdb": (lambda: "\n".join(LINES[1::4]).encode(), "only CA atoms, but a backbone needs"),
    "nan.pdb": (lambda: "\n".join(line[:30] + "     nan" + line[38:] for line in LINES).encode(), NO_CHAIN),
    "apart.pdb": (lambda: "\n".join([*LINES, "TER", *pdb_lines(FOLD, "B"), *LINES]).encode(), "'A' occurs twice"),
    "adjacent.pdb": (lambda: "\n".join([*LINES, "TER", *LINES]).encode(), "chain 'A' has 2 residues 1;"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_structure_is_refused_in_one_line_and_leaves_nothing(command, tmp_path: Path, name: str):
    content, words = REFUSED[name]
    (tmp_path / name).write_bytes(content())
    convert = f"data structures --data.source {tmp_path / name} --structures.store {tmp_path / 'store'}"
    outcome = command.refused(3, words, convert)
    assert outcome.out == "" and str(tmp_path / name) in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == [name]


ACCEPTED: dict[str, Callable[[], bytes]] = {
    "mmcif.pdb": mmcif,
    "binary.cif": lambda: mmcif(binary=True),
    "pdb.cif": lambda: PDB,
    "plain.pdb.gz": lambda: PDB,
    "packed.bcif": lambda: gzip.compress(mmcif(binary=True)),
    "mark.cif": lambda: b"\xef\xbb\xbf" + mmcif(),
    "crlf.pdb": lambda: PDB.replace(b"\n", b"\r\n"),
    "redo.cif": lambda: b"# PDB-REDO\ndata_1CBS\n#\n_software.name PDB-REDO\n" + mmcif().split(b"\n", 1)[1],
    "keywords.cif": lambda: re.sub(rb"loop_|data_|_atom_site[.]", lambda word: b" " + word[0].upper(), mmcif()),
    "inline.cif": lambda: mmcif().replace(b"loop_\n", b"loop_ ") + b"stop_\n",
    "ligands.cif": lambda: (
        b"data_comp_list\nloop_\n_chem_comp.id\nALA\n" + mmcif() + b"data_comp_ATP\n_chem_comp.id ATP\n"
    ),
    "peptide.pdb": lambda: "\n".join(pdb_lines(FOLD, record="HETATM")).encode(),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_structure_is_known_by_its_content(command, tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(ACCEPTED[name]())
    outcome = command.done(f"data structures --data.source {tmp_path / name} --structures.store {tmp_path / 'store'}")
    assert (outcome.err, outcome.out.count("\n")) == ("", 2), outcome
    store = StructureStore(tmp_path / "store", verify="full")
    assert store.store.text(0) == FOLD.residues
    wanted = FOLD.coordinates - FOLD.coordinates[:, 1].mean(0)
    np.testing.assert_allclose(store.atoms(0, 0, len(FOLD.residues))[0], wanted, atol=0.05)


def test_declared_predictions_are_counted_and_probable_ones_are_said(command, tmp_path: Path):
    lines = [line[:60] + f"{50 + int(line[22:26]) / 10:6.2f}" + line[66:] for line in LINES]
    path = write_pdb(tmp_path / "rank_1.pdb", lines)
    convert = f"data structures --data.source {path} --overwrite --structures.store {tmp_path / 'store'}"
    for option, words, confidence in (
        ("auto", "1 structure read as experimental although all atoms of a residue share one B-factor", 100),
        ("true", "1 structure read as predictions", 50.1),
        ("false", "1 record", 100),
    ):
        outcome = command.done(f"{convert} --data.structures.predicted {option}")
        assert words in outcome.out and ("read as" in outcome.out) == (option != "false")
        found = StructureStore(tmp_path / "store").atoms(0, 0, 1)[1][0]
        assert found == pytest.approx(confidence, abs=0.02)
    write_pdb(path, [line[:60] for line in LINES])
    command.refused(3, "rank_1.pdb: no confidence", f"{convert} --data.structures.predicted true")


def test_what_was_mended_is_said(command, tmp_path: Path):
    lines = [line[:17] + "UNK" + line[20:] for line in LINES[:4]] + LINES[4:80] + LINES[100:]
    models = ["MODEL        1", *lines, "ENDMDL", "MODEL        2", *lines, "ENDMDL"]
    ca_only = write_pdb(tmp_path / "ca.pdb", LINES[1::4])
    path = write_pdb(tmp_path / "models.pdb", models)
    outcome = command(
        *("data", "structures", "--data.source", path, ca_only, "--structures.store", tmp_path / "store"),
        *("--data.structures.ca_only", "complete"),
    )
    assert (outcome.code, outcome.err) == (0, "")
    lines = [line.strip() for line in outcome.out.splitlines()[1:-1]]
    assert lines == [
        "1 model after the first ignored",
        "1 chain with only CA atoms completed",
        "1 residue read as X",
        "1 chain break",
    ]
