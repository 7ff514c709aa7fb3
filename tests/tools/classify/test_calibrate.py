import csv
import json
from pathlib import Path

import numpy as np
import pytest

from esmeray.common.errors import ConfigError
from esmeray.inference.classifier import ClassifierPipeline
from tests.classifiers import NAMES, classifier_config, export_tiny, labelled_fasta


@pytest.fixture
def calibrate(command, tmp_path):
    def call(kind: str, records: int = 40) -> Path:
        labels = {"header_field": 1, "label_columns": ["stability", "activity"] if kind == "regression" else ["label"]}
        model = export_tiny(tmp_path / kind, classifier_config(kind, labels=labels))
        file = labelled_fasta(
            tmp_path / f"{kind}.fasta", [20] * records, "multiclass" if kind == "multiclass" else kind
        )
        if kind == "regression":
            rows = (f"{line},{n % 7},{n % 5}" for n, line in enumerate(file.read_text().splitlines()[1::2]))
            file = file.with_suffix(".csv")
            file.write_text("\n".join(["sequence,stability,activity", *rows]) + "\n")
        if kind == "per_residue":
            lines = file.read_text().splitlines()
            file.write_text("".join(f"{lines[n].split()[0]} {'CEHHE' * 4}\n{lines[n + 1]}\n" for n in range(0, 80, 2)))
        options = ("--evaluate.input", file, "--evaluate.output", tmp_path / f"report-{kind}")
        command.done("classify", "evaluate", model, *options, "--evaluate.calibrate", "true")
        return model

    return call


@pytest.mark.parametrize("kind", ["multiclass", "regression", "per_residue"])
def test_a_calibrated_model_predicts_sets_on_the_command_line(calibrate, command, tmp_path, kind):
    model = calibrate(kind)
    report = json.loads((tmp_path / f"report-{kind}" / "evaluation.json").read_text())
    assert 0.85 <= report["metrics"]["coverage_of_0.9"] <= 1
    assert ("ece_calibrated" in report["metrics"]) == ("set_size" in report["metrics"]) == (kind != "regression")
    file = labelled_fasta(tmp_path / "new.fasta", [30, 5])
    predict = ("classify", "predict", model, "--predict.input", file, "--predict.coverage")
    command.done(*predict, 0.9, "--predict.output", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as lines:
        first = next(csv.DictReader(lines))
    if kind == "regression":
        assert float(first["lower_activity"]) < float(first["predicted_activity"]) < float(first["upper_activity"])
    elif kind == "per_residue":
        assert (
            list(map(len, first["set"].split())) == list(map(int, first["set_size"].split()))
            and len(first["set"].split()) == 30
        )
    else:
        names = first["set"].split(";")
        shares = {name: float(first[f"probability_{name}"]) for name in NAMES[kind]}
        assert len(names) == int(first["set_size"]) and set(names) == {
            *sorted(shares, key=lambda name: -shares[name])[: len(names)]
        }
        command.refused(2, "at least 199 with", *predict, 0.995, "--predict.output", tmp_path / "few.csv")


def test_a_calibration_belongs_to_its_weights_and_is_required_for_sets(calibrate, command, tmp_path):
    model = calibrate("multiclass")
    other = export_tiny(tmp_path / "other", classifier_config(), seed=1)
    with pytest.raises(ConfigError, match="the model is not calibrated"):
        ClassifierPipeline.load(other, coverage=0.9)
    text = (model / "calibration.json").read_text()
    (other / "calibration.json").write_text(text)
    file = labelled_fasta(tmp_path / "new.fasta", [30, 5])
    options = ("--predict.input", file, "--predict.output", tmp_path / "out.csv")
    command.refused(3, "belongs to other weights", "classify", "predict", other, *options)
    raw = ClassifierPipeline.load(model, calibrated=False).predict(["MKTAYIAKQR"]).probabilities
    calibrated = ClassifierPipeline.load(model).predict(["MKTAYIAKQR"]).probabilities
    assert raw.argmax() == calibrated.argmax() and not np.array_equal(raw, calibrated)
    evaluate = ("classify", "evaluate", model, "--evaluate.calibrate", "true")
    command.refused(2, "--evaluate.calibrate: not with test records", *evaluate, "--evaluate.part", "test")
