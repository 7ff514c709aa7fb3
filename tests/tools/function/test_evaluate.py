"""``function evaluate``, which evaluates predicted terms."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from esmeray.function.ontology import read_ontology
from tests.function.cases import write_case

pytestmark = pytest.mark.slow

OPTIONS = ["--evaluate.unknown", "ignore"]


@pytest.fixture
def files(tmp_path) -> list[str]:
    """Command line arguments for predictions, truth and ontology."""
    folder = write_case(tmp_path / "case", 4).folder
    options = f"--evaluate.truth {folder / 'truth.tsv'} --evaluate.ontology {folder / 'terms.obo'}"
    return [str(folder / "predictions" / "some.tsv"), *options.split()]


def test_metrics_curves_and_picture_are_written(command, files, tmp_path):
    accretion = ["--evaluate.ia", tmp_path / "case" / "accretion.tsv"]
    outcome = command.done("function", "evaluate", *files, *accretion, *OPTIONS, "--evaluate.output", tmp_path / "out")
    assert "fmax_w" in outcome.out
    names = {"evaluation.json", "curves.tsv", "curves.png", "esmeray.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    best = pd.read_csv(tmp_path / "out" / "curves.tsv", sep="\t").groupby("ns")["f"].max()
    for aspect, one in found["aspects"].items():
        fmax = one["metrics"]["fmax"]
        assert fmax["value"] == pytest.approx(best[aspect], abs=1e-9) and fmax["interval"] == sorted(fmax["interval"])
    command.done("function", "evaluate", *files, *accretion, *OPTIONS, "--evaluate.output", tmp_path / "again")
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_known_annotations_are_left_out(command, files, tmp_path):
    truth = files[2]
    lines = Path(truth).read_text().splitlines(keepends=True)
    (tmp_path / "known.tsv").write_text("".join(lines[: len(lines) // 3]))
    known = ["--evaluate.known", tmp_path / "known.tsv"]
    outcome = command.done("function", "evaluate", *files, "--evaluate.ia_from", truth, *known, *OPTIONS)
    assert "smin_w" in outcome.out
    aspects = read_ontology(Path(files[-1])).aspects
    (tmp_path / "terms.txt").write_text("\n".join(aspects["molecular_function"].terms))
    alone = ["--evaluate.terms", tmp_path / "terms.txt", "--evaluate.orphans", "false"]
    outcome = command.done("function", "evaluate", *files, *OPTIONS, *alone)
    assert len(aspects) > 1 and outcome.out.count("with predictions") == 1


def test_what_cannot_be_evaluated_is_one_line(command, files, tmp_path):
    cyclic, low = tmp_path / "cyclic.obo", tmp_path / "low.tsv"
    cyclic.write_text("[Term]\nid: GO:1\nnamespace: x\nis_a: GO:1\n")
    low.write_text("P0\tGO:0000000\t0.001\n")
    (tmp_path / "others.tsv").write_text("sp|X|Y\tGO:0000000\n")
    for code, words, options in (
        (3, "form a cycle", [*files, "--evaluate.ontology", cyclic]),
        (3, "no protein with annotations to predict", [low, *files[1:], *OPTIONS]),
        (2, "give one", [*files, "--evaluate.ia", "a.tsv", "--evaluate.ia_from", "b.tsv"]),
        (3, "'sp|X|Y'", [*files, "--evaluate.known", tmp_path / "others.tsv", *OPTIONS]),
        (3, "to predict has a score above a threshold", [*files, "--evaluate.known", files[2], *OPTIONS]),
    ):
        outcome = command("function", "evaluate", *options)
        assert outcome.code == code and words in outcome.err


FIELD = {
    # Predictions, truth and ontology; expected: proteins with molecular functions, Fmax, omitted rows of the truth.
    ("pred.tsv", "truth.tsv", "go.obo"): (2, 1.0, ""),
    ("pred.tsv", "truth.tsv", "nonl.obo"): (2, 1.0, ""),
    ("pred.tsv", "wide.tsv", "go.obo"): (2, 1.0, ""),
    ("pred.tsv", "uniprot.tsv", "go.obo"): (2, 1.0, ""),
    # P4 has no prediction: precision 1, recall 2/3.
    **{
        ("pred.tsv", truth, "go.obo"): (
            3,
            0.8,
            ": left out: annotations with NOT: 2, annotations with other evidence codes: 2",
        )
        for truth in ("a21.gaf", "a22.gaf", "nohead.gaf", "not_lower.gaf")
    },
    ("hp_pred.tsv", "hp_truth.tsv", "hp.obo"): (1, 1.0, ""),
}


@pytest.mark.parametrize("names", FIELD, ids="-".join)
def test_files_as_people_have_them_are_read(command, shared_data, monkeypatch, tmp_path, caplog, names):
    monkeypatch.chdir(shared_data.parent / "field" / "annotations")
    predictions, truth, ontology = names
    options = f"--evaluate.truth {truth} --evaluate.ontology {ontology}".split()
    command.done("function", "evaluate", predictions, *options, "--evaluate.output", tmp_path / "out")
    aspects = json.loads((tmp_path / "out" / "evaluation.json").read_text())["aspects"]
    (aspect,) = aspects.values()
    proteins, fmax, left_out = FIELD[names]
    assert (aspect["proteins"], aspect["metrics"]["fmax"]["value"]) == (proteins, pytest.approx(fmax))
    assert left_out in caplog.text and (": left out: " in caplog.text) == bool(left_out)


EXAMPLE = "--evaluate.truth example/ground_truth_partial.tsv --evaluate.ontology example/go-sample.obo \
--evaluate.known example/known_t0.tsv --evaluate.terms example/toi.tsv"
TARGETS = "--evaluate.truth truth.tsv --evaluate.ontology ../go_2013-06.obo.gz --evaluate.known known.tsv \
--evaluate.ia ia.tsv"
OFFICIAL = [
    ("expected_example", "example/predictions/pred_1.tsv", EXAMPLE),
    ("expected_known_weighted", "predictions/made_up.tsv", f"{TARGETS} --evaluate.orphans false"),
    (
        "expected_known_terms",
        "predictions/made_up.tsv",
        f"{TARGETS} --evaluate.terms terms.tsv --evaluate.propagation fill --evaluate.norm gt",
    ),
]
BEST = {"fmax": "f", "fmax_micro": "f_micro", "smin": "s", "fmax_w": "f_w", "fmax_micro_w": "f_micro_w"}
WRITTEN = 5.0001e-4
"""Absolute tolerance: the expected files have three digits."""


@pytest.mark.parametrize(("expected", "predictions", "options"), OFFICIAL)
def test_partial_knowledge_gives_what_the_evaluator_of_cafa_6_gave(
    command, shared_data, monkeypatch, tmp_path, expected, predictions, options
):
    monkeypatch.chdir(shared_data / "go" / "cafaeval_pk")
    options = [*options.split(), "--evaluate.unknown", "ignore"]
    command.done("function", "evaluate", predictions, *options, "--evaluate.output", tmp_path / "ours")

    def theirs(path: Path) -> pd.DataFrame:
        table = pd.read_csv(path, sep="\t")
        return table[table.pop("filename") == Path(predictions).name].sort_values(["ns", "tau"])

    curves = theirs(Path(expected) / "evaluation_all.tsv")
    ours = pd.read_csv(tmp_path / "ours" / "curves.tsv", sep="\t").sort_values(["ns", "tau"])
    assert ours["ns"].tolist() == curves.pop("ns").tolist()
    np.testing.assert_allclose(ours[curves.columns], curves, rtol=0, atol=WRITTEN)
    aspects = json.loads((tmp_path / "ours" / "evaluation.json").read_text())["aspects"]
    for metric, column in BEST.items():
        path = Path(expected) / f"evaluation_best_{column}.tsv"
        for best in theirs(path).to_dict("records") if path.exists() else ():
            metrics = aspects[best["ns"]]["metrics"]
            found = [metrics[metric]["value"], metrics[metric]["threshold"], metrics["cov"]["value"]]
            assert found == pytest.approx([best[column], best["tau"], best["cov_max"]], abs=WRITTEN)
