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
    predictions = folder / "predictions" / "some.tsv"
    return [
        str(predictions),
        "--evaluate.truth",
        str(folder / "truth.tsv"),
        "--evaluate.ontology",
        str(folder / "terms.obo"),
    ]


def test_metrics_curves_and_picture_are_written(command, files, tmp_path):
    accretion = ["--evaluate.ia", tmp_path / "case" / "accretion.tsv"]
    outcome = command("function", "evaluate", *files, *accretion, *OPTIONS, "--evaluate.output", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert "fmax_w" in outcome.out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "evaluation.json",
        "curves.tsv",
        "curves.png",
        "esmeray.json",
    }
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert found["settings"]["draws"] == 50
    with (tmp_path / "out" / "curves.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    for aspect, one in found["aspects"].items():
        best = max(float(row["f"]) for row in rows if row["ns"] == aspect)
        assert one["metrics"]["fmax"]["value"] == pytest.approx(best, abs=1e-9)
        low, high = one["metrics"]["fmax"]["interval"]
        assert low <= high
    refused = command("function", "evaluate", *files, *OPTIONS, "--evaluate.output", tmp_path / "out")
    assert refused.code == 2 and "exists already" in refused.err


def test_the_same_command_gives_the_same_bytes(command, files, tmp_path):
    for name in ("first", "second"):
        assert command("function", "evaluate", *files, *OPTIONS, "--evaluate.output", tmp_path / name).code == 0
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes(), path.name


def test_weights_from_annotations_and_known_ones(command, files, tmp_path):
    truth = files[2]
    lines = Path(truth).read_text().splitlines(keepends=True)
    (tmp_path / "known.tsv").write_text("".join(lines[: len(lines) // 3]))
    known = ["--evaluate.known", tmp_path / "known.tsv"]
    outcome = command("function", "evaluate", *files, "--evaluate.ia_from", truth, *known, *OPTIONS)
    assert outcome.code == 0, outcome.err
    assert "smin_w" in outcome.out
    outcome = command("function", "evaluate", *files, "--evaluate.known", truth, *OPTIONS)
    assert outcome.code == 3 and "with annotations that count" in outcome.err


def test_an_aspect_with_no_term_that_counts_is_left_out(command, files, tmp_path):
    aspects = read_ontology(Path(files[-1])).aspects
    (tmp_path / "terms.txt").write_text("\n".join(aspects["molecular_function"].terms))
    outcome = command("function", "evaluate", *files, "--evaluate.terms", tmp_path / "terms.txt", *OPTIONS)
    assert outcome.code == 0, outcome.err
    assert len(aspects) > 1 and outcome.out.count("with predictions") == 1


def test_without_draws_there_are_no_intervals(command, files):
    outcome = command(
        "function",
        "evaluate",
        *files,
        "--evaluate.unknown",
        "ignore",
        "--evaluate.draws",
        0,
        "--evaluate.orphans",
        "false",
    )
    assert outcome.code == 0, outcome.err
    assert " to " not in outcome.out


def test_a_cyclic_ontology_and_scores_that_reach_nothing_are_refused(command, files, tmp_path):
    ontology = tmp_path / "cyclic.obo"
    ontology.write_text("[Term]\nid: GO:1\nnamespace: x\nis_a: GO:1\n")
    outcome = command("function", "evaluate", *files, "--evaluate.ontology", ontology)
    assert outcome.code == 3 and "run in a circle" in outcome.err
    (tmp_path / "low.tsv").write_text("P0\tGO:0000000\t0.001\n")
    outcome = command("function", "evaluate", tmp_path / "low.tsv", *files[1:], *OPTIONS)
    assert outcome.code == 3 and "no score reaches a threshold" in outcome.err


def test_two_sources_of_weights_exclude_each_other(command, files):
    outcome = command("function", "evaluate", *files, "--evaluate.ia", "a.tsv", "--evaluate.ia_from", "b.tsv")
    assert outcome.code == 2 and "give one" in outcome.err
