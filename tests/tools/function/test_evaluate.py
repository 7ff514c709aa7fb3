"""The evaluation of predicted terms from the command line."""

import csv
import json
from pathlib import Path

import pytest

from esmeray.function.ontology import read_ontology
from tests.function.generated import generate

OPTIONS = ["--evaluate.unknown", "ignore", "--evaluate.draws", "50"]


@pytest.fixture
def files(tmp_path) -> list[str]:
    """Predictions, truth and ontology as arguments."""
    folder = generate(tmp_path / "case", 4).folder
    options = f"--evaluate.truth {folder / 'truth.tsv'} --evaluate.ontology {folder / 'terms.obo'}"
    return [str(folder / "predictions" / "some.tsv"), *options.split()]


def test_metrics_curves_and_picture_are_written(command, files, tmp_path):
    accretion = ["--evaluate.ia", tmp_path / "case" / "accretion.tsv"]
    outcome = command.done("function", "evaluate", *files, *accretion, *OPTIONS, "--evaluate.output", tmp_path / "out")
    assert "fmax_w" in outcome.out
    names = {"evaluation.json", "curves.tsv", "curves.png", "esmeray.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert found["settings"]["draws"] == 50
    with (tmp_path / "out" / "curves.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    for aspect, one in found["aspects"].items():
        best = max(float(row["f"]) for row in rows if row["ns"] == aspect)
        assert one["metrics"]["fmax"]["value"] == pytest.approx(best, abs=1e-9)
        low, high = one["metrics"]["fmax"]["interval"]
        assert low <= high
    command.done("function", "evaluate", *files, *accretion, *OPTIONS, "--evaluate.output", tmp_path / "again")
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_known_annotations_are_left_out_as_is_an_aspect_with_no_term_that_counts(command, files, tmp_path):
    truth = files[2]
    lines = Path(truth).read_text().splitlines(keepends=True)
    (tmp_path / "known.tsv").write_text("".join(lines[: len(lines) // 3]))
    known = ["--evaluate.known", tmp_path / "known.tsv"]
    outcome = command.done("function", "evaluate", *files, "--evaluate.ia_from", truth, *known, *OPTIONS)
    assert "smin_w" in outcome.out
    aspects = read_ontology(Path(files[-1])).aspects
    (tmp_path / "terms.txt").write_text("\n".join(aspects["molecular_function"].terms))
    alone = ["--evaluate.terms", tmp_path / "terms.txt", "--evaluate.draws", 0, "--evaluate.orphans", "false"]
    outcome = command.done("function", "evaluate", *files, *OPTIONS, *alone)
    assert len(aspects) > 1 and outcome.out.count("with predictions") == 1
    assert " to " not in outcome.out, "without draws there are no intervals"


def test_what_cannot_be_evaluated_is_one_line(command, files, tmp_path):
    cyclic, low = tmp_path / "cyclic.obo", tmp_path / "low.tsv"
    cyclic.write_text("[Term]\nid: GO:1\nnamespace: x\nis_a: GO:1\n")
    low.write_text("P0\tGO:0000000\t0.001\n")
    evaluate = ("function", "evaluate")
    command.refused(3, "run in a circle", *evaluate, *files, "--evaluate.ontology", cyclic)
    assert "no score reaches a threshold" in command(*evaluate, low, *files[1:], *OPTIONS).err
    command.refused(2, "give one", *evaluate, *files, "--evaluate.ia", "a.tsv", "--evaluate.ia_from", "b.tsv")
    whole = command(*evaluate, *files, "--evaluate.known", files[2], *OPTIONS)
    assert whole.code == 3 and "with annotations that count" in whole.err
