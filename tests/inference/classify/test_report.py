import csv
import json
import re

import numpy as np
import pytest

from esmeray.dataset.targets import IGNORED_TARGET, LabelSpace
from esmeray.inference.classify.report import Scored, evaluation_of, metrics_lines, write_report
from esmeray.model.metrics.classification import bootstrap_intervals, classification_metrics

SPACE = LabelSpace("multiclass", ("cytoplasm", "mem|brane", "nucleus"))
IDS = [f"P{index:05d}" for index in range(60)]


def case():
    generator = np.random.default_rng(0)
    targets = generator.integers(3, size=60)
    scores = generator.random((60, 3))
    scores[np.arange(60), targets] += 0.4
    targets[0] = IGNORED_TARGET
    return (scores / scores.sum(axis=1, keepdims=True)).astype(np.float32), targets


def test_metrics_baselines_and_mistakes_are_those_of_the_predictions(tmp_path):
    probabilities, targets = case()
    majority = {"majority class": np.tile(np.float32([0.5, 0.3, 0.2]), (60, 1))}
    scored = Scored(SPACE, IDS, probabilities, targets)
    found = evaluation_of(scored, majority, samples=50, seed=1)
    assert found["metrics"] == classification_metrics("multiclass", probabilities, targets)
    intervals = bootstrap_intervals("multiclass", probabilities, targets, samples=50, seed=1)
    assert found["intervals"] == {name: list(interval) for name, interval in intervals.items()}
    assert found["baselines"]["majority class"]["metrics"]["auroc"] == 0.5
    assert (found["records"], found["without_target"]) == (60, 1)

    write_report(tmp_path, scored, found, best_of="mcc", counts={"dropped_short": 4}, facts={"checkpoint": "step 10"})
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert {name: content[name] for name in found} == found
    text = (tmp_path / "report.md").read_text()
    first = rf"\| metric +\| model +\| majority class.*\n.*\n\| mcc +\| {found['metrics']['mcc']:.3f} \["
    assert re.search(first, text), "the metric that chose the model"
    assert re.search(r"\| dropped short +\| 4 ", text) and re.search(r"\| checkpoint +\| step 10 ", text)
    assert "mem\\|brane" in text and "nan" not in text.lower()

    with (tmp_path / "confusion.tsv").open(newline="") as file:
        rows = list(csv.reader(file, dialect="excel-tab"))
    missed = int(((targets == 1) & (probabilities.argmax(axis=1) == 2)).sum())
    assert rows[0][1:] == list(SPACE.names) and int(rows[2][3]) == missed > 0


def test_metrics_by_identity_are_those_of_the_records_and_near_copies_are_warned_of():
    probabilities, targets = case()
    scored = Scored(SPACE, IDS, probabilities, targets)
    identities = np.full(60, np.nan)
    identities[:30] = [0.0] * 9 + [0.3] * 20 + [0.95]
    found = evaluation_of(scored, {}, samples=20, identities_N=identities)
    bins = found["by_identity"]
    assert {name: entry["records"] for name, entry in bins.items()} == {"below 30 %": 9, "30–50 %": 20, "95–100 %": 1}
    assert bins["30–50 %"]["metrics"] == classification_metrics("multiclass", probabilities[9:29], targets[9:29])
    text = "\n".join(metrics_lines(found))
    assert "(30 records, a random sample)" in text and "1 of 30 records have near copies in training" in text
    distant = "\n".join(metrics_lines(evaluation_of(scored, {}, samples=20, identities_N=np.zeros(60))))
    assert "below 30 %, 60 records" in distant and "near copies" not in distant


@pytest.mark.parametrize("kind", ["multilabel", "regression"])
def test_other_kinds_have_reports(tmp_path, kind):
    generator = np.random.default_rng(0)
    probabilities = generator.random((30, 2))
    targets = (generator.random((30, 2)) < 0.5).astype(np.float32)
    scored = Scored(LabelSpace(kind, ("a", "b")), IDS[:30], probabilities, targets)
    found = evaluation_of(scored, {}, samples=20)
    write_report(tmp_path, scored, found)
    assert {entry["name"] for entry in found["classes"]} == {"a", "b"}
    assert list(tmp_path.glob("*.png")) and not (tmp_path / "confusion.tsv").exists()


def test_residues_are_resampled_by_records_and_weights_count():
    probabilities, targets = case()
    lengths = np.array([10, 20, 30])
    space = LabelSpace("per_residue", ("C", "E", "H"))
    scored = Scored(space, ["p", "q", "r"], probabilities, targets, lengths=lengths)
    found = evaluation_of(scored, {}, samples=20)
    assert (found["records"], found["residues"]) == (3, 60)
    groups = np.repeat(np.arange(3), lengths)
    intervals = bootstrap_intervals("per_residue", probabilities, targets, 20, 0, groups=groups)
    assert found["intervals"]["accuracy"] == list(intervals["accuracy"])
    right = (probabilities.argmax(axis=1) == targets).astype(np.float32)
    assert evaluation_of(Scored(SPACE, IDS, probabilities, targets, right), {}, samples=20)["metrics"]["accuracy"] == 1
