"""``esmeray design generate``, ``score`` and ``evaluate``: designs for structure files, and refusals."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.model.export.test_proteinmpnn_weights import checkpoint
from tests.structures import folds, pdb_lines, structure_store, write_pdb
from tests.tools.conftest import Outcome

pytestmark = pytest.mark.slow

FOLDS = folds(2)


@pytest.fixture(scope="module")
def here(artifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("designs")
    (folder / "export").symlink_to(artifacts.diffusion / "export")
    for fold in FOLDS:
        write_pdb(folder / f"{fold.id}.pdb", pdb_lines(fold))
    structure_store(folder / "folds", 3)
    one = FOLDS[0]
    write_pdb(folder / "dimer.cif.pdb", pdb_lines(one, "A"), pdb_lines(one, "B"))
    return folder


def test_all_of_a_store_or_a_part_is_evaluated(here: Path, command, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("esmeray.inference.design.evaluation.STEPS", 2)
    store = structure_store(tmp_path / "folds", 4, validation_share=0.5)
    held_out = store.validation.size
    given = ["design", "evaluate", here / "export", "--evaluate.store", store.path]
    whole = command.done(*given, "--evaluate.output", tmp_path / "all.json")
    assert "evaluated 4 of 4 records; left out: 0 in other parts, 0 without" in whole.err
    assert f"{held_out} of them are in the store's validation part; to evaluate only these, give" in whole.err
    part = command.done(*given, "--evaluate.part", "validation", "--evaluate.output", tmp_path / "part.json")
    assert f"evaluated {held_out} of 4 records; left out: {4 - held_out} in other parts" in part.err
    found = [json.loads((tmp_path / name).read_text()) for name in ("all.json", "part.json")]
    assert [(each["part"], each["proteins"]) for each in found] == [("all", 4), ("validation", held_out)]
    assert found[0]["metrics"]["perplexity"]["value"] != pytest.approx(found[1]["metrics"]["perplexity"]["value"])
    (tmp_path / "a.fasta").write_text(">a\nMKTAYIAKQR\n>b\nGAVLIPFW\n")
    structures = f"data structures --data.source {tmp_path / 'a.fasta'} --structures.store {tmp_path / 'none'}"
    command.done(f"{structures} --data.predictions.folder {tmp_path / 'predicted'} --data.predictions.on_miss null")
    outcome = command("design", "evaluate", here / "export", "--evaluate.store", tmp_path / "none")
    assert outcome.code == 3 and "none of the 2 records has a structure" in outcome.err


@pytest.fixture
def generated(here: Path, command, tmp_path: Path, monkeypatch) -> Callable[[str], tuple[Outcome, dict[str, str]]]:
    """Function that generates with these options; returns the outcome and the designs by header."""

    # Skip the logo, which takes most of the time; inference/design/test_report.py tests it.
    monkeypatch.setattr("esmeray.inference.design.report.draw_logo", lambda path, *_: path.touch())

    def call(options: str) -> tuple[Outcome, dict[str, str]]:
        own = options.replace("--", "--generate.")
        outcome = command.done(f"design generate {here} --generate.output {tmp_path / 'designs'} {own}")
        parts = [part.split("\n") for part in (tmp_path / "designs" / "designs.fasta").read_text().split(">")[1:]]
        return outcome, {name: "".join(lines) for name, *lines in parts}

    return call


def test_designs_keep_fixed_residues_and_leave_out_omitted_ones(here, generated, command, tmp_path):
    out = tmp_path / "designs"
    how = f"--number 3 --label helix --fix 1-5,9 --omit CW --steps 4 --temperature 1 --known {here}/folds/sequences"
    _, designs = generated(f"--structures {here / 'fold*.pdb'} {how}")
    assert len(designs) == 6 and all("score=-" in name and "recovery=0." in name for name in designs)
    assert all("novelty=0." in name and "nearest=fold" in name for name in designs)
    for name, residues in designs.items():
        native = next(fold.residues for fold in FOLDS if name.startswith(fold.id))
        assert residues[:5] + residues[8] == native[:5] + native[8]
        assert not set("CW") & set(residues[9:]) and len(residues) == len(native)
    rows = list(csv.DictReader((out / "probabilities.tsv").open(), delimiter="\t"))
    assert len(rows) == sum(len(fold.residues) for fold in FOLDS)
    assert sum(float(rows[20][letter]) for letter in "ACDEFGHIKLMNPQRSTVWY") == pytest.approx(1, abs=2e-3)
    assert all((out / f"{fold.id}_A.png").exists() for fold in FOLDS)
    command.refused(2, "exists", f"design generate {here} --generate.length 9 --generate.output {out}")


def test_residues_are_fixed_by_the_numbers_of_the_file(generated, tmp_path):
    # Residues 10 to 12 are missing in the file, so residue 16 is the thirteenth.
    lines = [line for line in pdb_lines(FOLDS[0]) if int(line[22:26]) not in (10, 11, 12)]
    path = write_pdb(tmp_path / "gaps.pdb", lines)
    outcome, designs = generated(f"--structures {path} --fix 8-14,A:16,A:#1 --steps 2 --temperature 1")
    ((header, residues),) = designs.items()
    native = FOLDS[0].residues[:9] + FOLDS[0].residues[12:]
    assert " fixed=A:1,A:8-9,A:13-14,A:16 " in header
    assert "6 residues fixed\n  3 residue numbers in the ranges" in outcome.out
    rows = list(csv.DictReader((tmp_path / "designs" / "probabilities.tsv").open(), delimiter="\t"))
    fixed = [row for row in rows if row["fixed"] == "1"]
    assert [row["number"] for row in fixed] == ["1", "8", "9", "13", "14", "16"] and fixed[-1]["position"] == "13"
    assert all(residues[int(row["position"]) - 1] == row["native"] == native[int(row["position"]) - 1] for row in fixed)


def test_chains_of_a_complex_are_tied(here: Path, generated):
    _, designs = generated(f"--structures {here / 'dimer.cif.pdb'} --chains complex --tie A,B --fix B:1-3 --steps 3")
    (residues,) = designs.values()
    half = len(residues) // 2
    assert residues[:half] == residues[half:] and residues[half : half + 3] == FOLDS[0].residues[:3]


def test_sequences_need_no_structure(generated):
    outcome, designs = generated("--length 33 --steps 2 --temperature 0 --number 3")
    assert "3 sequences for 1 structure, 2 of them duplicates" in outcome.out
    assert {len(text) for text in designs.values()} == {33} and len(set(designs.values())) == 1
    assert ["same_as=free_1" in name for name in designs] == [False, True, True]


def test_given_sequences_are_scored(here: Path, command, tmp_path: Path):
    native = FOLDS[0].residues
    (tmp_path / "in.fasta").write_text(f">native\n{native}\n>shifted\n{native[1:]}{native[0]}\n>short\nMKT\n")
    files = f"--score.sequences {tmp_path / 'in.fasta'} --score.output {tmp_path / 'scores.tsv'}"
    command.done(f"design score {here} --score.structures {here / 'fold0000.pdb'} {files}")
    rows = {row["sequence"]: row for row in csv.DictReader((tmp_path / "scores.tsv").open(), delimiter="\t")}
    assert set(rows) == {"native", "shifted"} and float(rows["native"]["recovery"]) == 1
    assert np.isfinite([float(row["log_likelihood"]) for row in rows.values()]).all()


def test_weights_of_proteinmpnn_design_score_and_evaluate(here: Path, command, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("esmeray.inference.design.report.draw_logo", lambda path, *_: path.touch())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, out = checkpoint(tmp_path / "own.pt"), tmp_path / "out"
    (tmp_path / "bias.json").write_text('{"W": 50, "1-3": {"W": -100, "K": 50}}')
    how = f"--generate.number 2 --generate.bias {tmp_path / 'bias.json'} --generate.structures {here / 'fold*.pdb'}"
    generated = command.done(f"design generate {model} --generate.output {out} {how}")
    assert "weights: own.pt (unknown license); these structures may be in their training data" in generated.out
    lines = (out / "designs.fasta").read_text().splitlines()
    assert len(lines) == 8 and all("weights=own.pt_(unknown_license)" in line for line in lines[::2])
    assert all(set(line[3:]) == {"W"} and line[:3] == "KKK" for line in lines[1::2])
    files = f"--score.structures {here / 'fold*.pdb'} --score.sequences {out / 'designs.fasta'}"
    scored = command.done(f"design score {model} {files} --score.output {tmp_path / 'scores.tsv'}")
    assert "4 scores on 2 structures\n  weights: own.pt" in scored.out
    store = f"--evaluate.store {here / 'folds'} --evaluate.output {tmp_path / 'metrics.json'}"
    assert "weights: own.pt" in command.done(f"design evaluate {model} {store}").err
    assert json.loads((tmp_path / "metrics.json").read_text())["weights"] == "own.pt (unknown license)"
    for option in ("--generate.steps 3", "--generate.guidance 2", "--generate.label helix"):
        command.refused(2, option.split()[1], f"design generate {model} --generate.output {out}2 {how} {option}")
    command.refused(2, "length", f"design generate {model} --generate.output {out}2 --generate.length 9")
    command.refused(3, "can't be read", f"design generate {tmp_path}/none.pt --generate.output {out}2 {how}")


def test_requests_that_can_not_be_end_in_one_line(here, command, monkeypatch, tmp_path):
    monkeypatch.chdir(here)
    for options, words, code in [
        ("--generate.length 5", "either --generate.structures or --generate.length", 2),
        ("--generate.fix 999", "has residues A:1-107, or positions #1-107", 2),
        ("--generate.fix a", "write residue numbers like", 2),
        ("--generate.tie A,B", "name a chain of", 2),
        ("--generate.omit 1", "give amino acids", 2),
        ("--generate.label knot", "the model's labels are helix, barrel", 2),
        ("--generate.structures none.pdb", "no such file", 3),
        ("--generate.chains Z", "has no protein chain Z", 3),
    ]:
        generate = f"design generate . --generate.structures fold0000.pdb --generate.output {tmp_path / 'out'}"
        command.refused(code, words, f"{generate} {options}")
    assert not (tmp_path / "out").exists()
