import csv
import json

import numpy as np
import pytest

from dataset.labels.label_space import IGNORED_TARGET, LabelSpace
from inference.report import write_report
from model.metrics.classification import bootstrap_intervals, classification_metrics

SPACE = LabelSpace("multiclass", ("cytoplasm", "mem|brane", "nucleus"))


def case(rows=60, seed=0):
    generator = np.random.default_rng(seed)
    targets = generator.integers(3, size=rows)
    scores = generator.random((rows, 3))
    scores[np.arange(rows), targets] += 0.4
    return (scores / scores.sum(axis=1, keepdims=True)).astype(np.float32), targets


def report(folder, **arguments):
    probabilities, targets = case()
    targets[0] = IGNORED_TARGET
    ids = [f"P{index:05d}" for index in range(60)]
    majority = np.tile(np.float32([0.5, 0.3, 0.2]), (60, 1))
    counts = {"read": 64, "dropped_short": 4}
    baselines = {"majority class": majority}
    arguments = {"samples": 50, "seed": 1, **arguments}
    return write_report(folder, SPACE, ids, probabilities, targets, baselines, counts, **arguments)


def test_figures_intervals_and_baselines_are_those_of_the_predictions(tmp_path):
    evaluation = report(tmp_path / "evaluation", best_of="mcc", facts={"checkpoint": "step 10"})
    probabilities, targets = case()
    targets[0] = IGNORED_TARGET
    assert evaluation["figures"] == classification_metrics("multiclass", probabilities, targets)
    intervals = bootstrap_intervals("multiclass", probabilities, targets, samples=50, seed=1)
    assert evaluation["intervals"] == {name: list(interval) for name, interval in intervals.items()}
    assert evaluation["baselines"]["majority class"]["figures"]["auroc"] == 0.5
    assert (evaluation["records"], evaluation["without_target"]) == (60, 1)
    assert json.loads((tmp_path / "evaluation" / "evaluation.json").read_text()) == evaluation


def test_report_is_a_table_of_the_model_beside_its_baselines(tmp_path):
    evaluation = report(tmp_path, best_of="mcc", facts={"checkpoint": "step 10"})
    text = (tmp_path / "report.md").read_text()
    lines = text.splitlines()
    header = lines.index("| figure | model | majority class |")
    assert lines[header + 2].startswith(f"| Matthews correlation | {evaluation['figures']['mcc']:.3f} [")
    assert "| dropped short | 4 |" in lines
    assert "| checkpoint | step 10 |" in lines
    assert "mem\\|brane" in text
    assert "nan" not in text.lower()


def test_confused_pairs_come_with_the_surest_mistakes(tmp_path):
    evaluation = report(tmp_path)
    probabilities, targets = case()
    targets[0] = IGNORED_TARGET
    pairs = evaluation["confused"]
    assert [pair["rows"] for pair in pairs] == sorted((pair["rows"] for pair in pairs), reverse=True)
    assert sum(pair["rows"] for pair in pairs) == ((probabilities.argmax(axis=1) != targets) & (targets >= 0)).sum()
    first = pairs[0]
    truth, taken_for = SPACE.names.index(first["truth"]), SPACE.names.index(first["taken_for"])
    mistakes = np.flatnonzero((targets == truth) & (probabilities.argmax(axis=1) == taken_for))
    surest = mistakes[probabilities[mistakes].max(axis=1).argmax()]
    assert first["examples"][0] == f"P{surest:05d}"
    with (tmp_path / "confusion.tsv").open(newline="") as file:
        rows = list(csv.reader(file, dialect="excel-tab"))
    assert rows[0][1:] == list(SPACE.names)
    assert int(rows[1 + truth][1 + taken_for]) == first["rows"]


def test_the_files_are_those_that_are_named(tmp_path):
    evaluation = report(tmp_path)
    expected = {"evaluation.json", "report.md", "confusion.tsv", *evaluation["pictures"]}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_the_same_seed_gives_the_same_report(tmp_path):
    report(tmp_path / "a")
    report(tmp_path / "b")
    assert (tmp_path / "a" / "evaluation.json").read_bytes() == (tmp_path / "b" / "evaluation.json").read_bytes()


@pytest.mark.parametrize("kind", ["binary", "multilabel", "regression"])
def test_other_kinds_have_reports(tmp_path, kind):
    generator = np.random.default_rng(0)
    probabilities = generator.random((30, 2))
    targets = (generator.random((30, 2)) < 0.5).astype(np.float32)
    if kind == "binary":
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        targets = targets[:, 0].astype(np.int64)
    space = LabelSpace(kind, ("a", "b"))
    ids = [str(index) for index in range(30)]
    evaluation = write_report(tmp_path, space, ids, probabilities, targets, {}, {}, samples=20)
    assert {entry["name"] for entry in evaluation["classes"]} == {"a", "b"}
    assert all((tmp_path / name).stat().st_size > 1000 for name in evaluation["pictures"])
    assert ("confused" in evaluation) == (kind == "binary")


def test_residues_are_judged_by_records(tmp_path):
    probabilities, targets = case()
    lengths = np.array([10, 20, 30])
    space = LabelSpace("per_residue", ("C", "E", "H"))
    ids = ["p", "q", "r"]
    evaluation = write_report(tmp_path, space, ids, probabilities, targets, {}, {}, samples=20, lengths=lengths)
    assert (evaluation["records"], evaluation["residues"]) == (3, 60)
    groups = np.repeat(np.arange(3), lengths)
    intervals = bootstrap_intervals("per_residue", probabilities, targets, 20, 0, groups=groups)
    assert evaluation["intervals"]["accuracy"] == list(intervals["accuracy"])
    assert set(evaluation["confused"][0]["examples"]) <= set(ids)
    with pytest.raises(ValueError, match="need their lengths"):
        write_report(tmp_path, space, ids, probabilities, targets, {}, {}, samples=20)


def test_weights_count_in_the_report(tmp_path):
    probabilities, targets = case()
    right = (probabilities.argmax(axis=1) == targets).astype(np.float32)
    ids = [str(index) for index in range(60)]
    evaluation = write_report(tmp_path, SPACE, ids, probabilities, targets, {}, {}, samples=20, weights=right)
    assert evaluation["figures"]["accuracy"] == 1
