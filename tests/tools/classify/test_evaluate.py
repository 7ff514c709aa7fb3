import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from esmeray.dataset.labels.conversion import ensure_labelled_store
from esmeray.dataset.labels.store import LabelledStore
from esmeray.inference.classifier import ClassifierPipeline
from esmeray.run_folder.paths import RunFolder
from esmeray.training.config import Config
from tests.classifiers import NAMES, classifier_config, export_tiny, labelled_fasta
from tests.model.support import random_sequences
from tests.runs import a_manifest
from tests.tools.conftest import Outcome

LENGTHS = [30, 4, 90, 12, 90, 5, 8, 22, 17]
HEADER = {"header_field": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return export_tiny(tmp_path_factory.mktemp("model") / "model", classifier_config(labels=HEADER))


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch) -> None:
    """Tests of the report draw them."""
    monkeypatch.setattr("esmeray.inference.classify.report._draw", lambda *_: [])


@pytest.fixture
def proteins(tmp_path) -> Path:
    return labelled_fasta(tmp_path / "proteins.fasta", LENGTHS)


@pytest.fixture
def evaluate(command) -> Callable[..., Outcome]:
    return partial(command, "classify", "evaluate")


def stored_in(folder: Path, config: Config) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"storage_path": str(folder / "runs")})})


def write_checkpoint(config: Config, store_checksum: str) -> None:
    checkpoint = RunFolder(config.run.storage_path, config.run.name).checkpoints / "step-00000001"
    checkpoint.mkdir(parents=True)
    trained_on = {"store_checksum": store_checksum, "config": config.model_dump(mode="json")}
    manifest = a_manifest(1).model_copy(update=trained_on).sealed()
    (checkpoint / "manifest.json").write_text(manifest.model_dump_json())


def evaluation(folder: Path) -> dict:
    return json.loads((folder / "evaluation.json").read_text())


def test_the_metrics_are_those_of_the_predictions(evaluate, model, proteins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = evaluate(model, "--evaluate.input", proteins)
    assert outcome.code == 0, outcome.err
    found = evaluation(tmp_path / "evaluation-proteins")
    predictions = ClassifierPipeline.load(model, device="cpu").predict(random_sequences(LENGTHS)).labels()
    truth = [NAMES["multiclass"][number % 3] for number in range(len(LENGTHS))]
    accuracy = np.mean([one == other for one, other in zip(predictions, truth, strict=True)])
    assert found["metrics"]["accuracy"] == pytest.approx(accuracy)
    assert (found["records"], found["bootstrap"]["samples"]) == (9, 20)
    report = (tmp_path / "evaluation-proteins" / "report.md").read_text()
    for words in ("accuracy", f"{accuracy:.3f} [", "mcc"):
        assert words in outcome.out and words in report, words
    assert "evaluation-proteins/report.md" in outcome.out


def test_the_report_of_a_run_lies_in_its_folder_and_is_replaced_only_when_asked(evaluate, model, proteins, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(model, run / "export")
    (run / "metrics.jsonl").touch()
    assert evaluate(run, "--evaluate.input", proteins).code == 0
    assert evaluate(run, "--evaluate.input", proteins, "--evaluate.part", "all").err.endswith(
        "choose another name or pass --overwrite\n"
    )
    before = (run / "evaluations" / "proteins" / "report.md").stat().st_ino
    assert evaluate(run / "export", "--evaluate.input", proteins, "--overwrite").code == 0
    assert (run / "evaluations" / "proteins" / "report.md").stat().st_ino != before
    assert [path.name for path in (run / "evaluations").iterdir()] == ["proteins"]


def test_a_label_that_the_model_does_not_know_is_refused_or_left_out(evaluate, model, proteins, tmp_path):
    proteins.write_text(proteins.read_text() + ">strange vacuole\nMKTA\n")
    arguments = (model, "--evaluate.input", proteins, "--evaluate.output", tmp_path / "r")
    outcome = evaluate(*arguments)
    assert outcome.code == 3 and outcome.err.count("\n") == 1
    for words in ("strange", "'vacuole'", "--data.labels.unseen_labels skip"):
        assert words in outcome.err, words
    outcome = evaluate(*arguments, "--data.labels.unseen_labels", "skip")
    assert outcome.code == 0 and "1 record unseen label" in outcome.out
    assert evaluation(tmp_path / "r")["records"] == 9


def test_a_part_of_a_table_is_chosen_by_its_split_column(evaluate, model, tmp_path):
    sequences, names = random_sequences(LENGTHS), NAMES["multiclass"]
    parts = ["train", "valid", "test"]
    rows = [f"{text},{names[n % 3]},{parts[n // 3]}" for n, text in enumerate(sequences)]
    (tmp_path / "a.csv").write_text("sequence,label,part\n" + "\n".join(rows) + "\n")
    file, output = tmp_path / "a.csv", tmp_path / "r"
    arguments = (model, "--evaluate.input", file, "--evaluate.output", output, "--evaluate.part", "test")
    outcome = evaluate(*arguments, "--data.labels.split", "column", "--data.labels.split_column", "part")
    assert outcome.code == 0, outcome.err
    assert evaluation(tmp_path / "r")["records"] == 3
    outcome = evaluate(*arguments, "--overwrite")
    assert outcome.code == 2 and "--evaluate.part test of a file needs a split column" in outcome.err
    outcome = evaluate(*arguments, "--overwrite", "--data.labels.kind", "regression")
    assert outcome.code == 2 and "the model was trained for multiclass" in outcome.err


def test_cropped_residues_do_not_count(evaluate, tmp_path):
    sequences = random_sequences([30, 5])
    config = classifier_config("per_residue", max_length=20, crop="ends", labels=HEADER)
    model = export_tiny(tmp_path / "model", config)
    letters = ClassifierPipeline.load(model, device="cpu").predict(sequences).labels()
    # What is predicted is right, and what is cropped is of another class in the file.
    truth = [one.replace("?", "H") for one in letters]
    (tmp_path / "a.fasta").write_text("".join(f">p{n} {truth[n]}\n{text}\n" for n, text in enumerate(sequences)))
    outcome = evaluate(model, "--evaluate.input", tmp_path / "a.fasta", "--evaluate.output", tmp_path / "r")
    assert outcome.code == 0, outcome.err
    found = evaluation(tmp_path / "r")
    assert found["metrics"]["accuracy"] == 1.0 and found["residues"] == 25
    assert found["counts"]["records_cropped"] == 1


def test_data_that_changed_since_training_is_not_scored_as_what_the_run_held_out(evaluate, tmp_path):
    source = labelled_fasta(tmp_path / "training.fasta", [20] * 30)
    config = stored_in(tmp_path, classifier_config(labels=HEADER, source=[str(source)], validation_share=0.3))
    model = export_tiny(tmp_path / "model", config)
    write_checkpoint(config, "0" * 64)
    outcome = evaluate(model, "--evaluate.output", tmp_path / "r")
    assert outcome.code == 6
    assert "was trained on" in outcome.err and "as it is (checksum" in outcome.err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("kind", ["multiclass", "per_residue"])
def test_records_that_the_model_was_trained_on_are_counted_and_left_out_of_a_second_number(evaluate, tmp_path, kind):
    sequences = random_sequences([20 + n for n in range(12)], 5)
    labels = [("CEH" * 20)[: len(text)] if kind == "per_residue" else NAMES[kind][len(text) % 3] for text in sequences]
    records = [f">p{n} {label}\n{text}\n" for n, (label, text) in enumerate(zip(labels, sequences, strict=True))]
    (tmp_path / "training.fasta").write_text("".join(records[:8]))
    (tmp_path / "new.fasta").write_text("".join(records[8:]))
    (tmp_path / "both.fasta").write_text("".join(records[5:]))
    source = [str(tmp_path / "training.fasta")]
    config = stored_in(tmp_path, classifier_config(kind, labels=HEADER, source=source, validation_share=0.0))
    run = RunFolder(config.run.storage_path, config.run.name)
    labelled = LabelledStore(ensure_labelled_store(config.data, config.model.tokenizer, run.stores))
    model = export_tiny(tmp_path / "model", config)
    unknown = evaluate(model, "--evaluate.input", tmp_path / "both.fasta", "--evaluate.output", tmp_path / "unknown")
    assert unknown.code == 0 and "is not known: its run's data are not here" in unknown.out
    assert evaluation(tmp_path / "unknown")["in_training"] is None
    assert "| trained on its records | not known" in (tmp_path / "unknown" / "report.md").read_text()
    write_checkpoint(config, labelled.checksum)
    (tmp_path / "training.fasta").write_text("gone")
    found = {}
    for name in ("both", "new"):
        outcome = evaluate(model, "--evaluate.input", tmp_path / f"{name}.fasta", "--evaluate.output", tmp_path / name)
        assert outcome.code == 0, outcome.err
        found[name] = evaluation(tmp_path / name)
        assert "not known" not in outcome.out
    assert (found["both"]["in_training"], found["new"]["in_training"]) == (3, 0)
    new = found["both"]["not_in_training"]
    assert new["records"] == 4 and new["metrics"] == found["new"]["metrics"] != found["both"]["metrics"]
    assert new["intervals"] == found["new"]["intervals"] and "not_in_training" not in found["new"]
    report = (tmp_path / "both" / "report.md").read_text()
    assert "The model was trained on 3 of these 7 records." in report and "| model, not trained on" in report


def test_several_numbers_are_evaluated_in_the_order_of_the_model(evaluate, tmp_path):
    columns = list(NAMES["regression"])
    model = export_tiny(tmp_path / "model", classifier_config("regression", labels={"label_columns": columns}))
    rows = [f"{text},{n / 3},{-n % 4}" for n, text in enumerate(random_sequences(LENGTHS))]
    (tmp_path / "a.csv").write_text("\n".join([f"sequence,{','.join(columns)}", *rows]))
    arguments = (model, "--evaluate.input", tmp_path / "a.csv", "--evaluate.output", tmp_path / "r")
    outcome = evaluate(*arguments)
    assert outcome.code == 0, outcome.err
    assert "spearman" in evaluation(tmp_path / "r")["metrics"] and "spearman" in outcome.out
    outcome = evaluate(*arguments, "--overwrite", "--data.labels.label_columns", *reversed(columns))
    assert outcome.code == 2 and "the model has stability, activity in this order" in outcome.err


def test_baselines_are_fitted_on_the_run_s_own_source(evaluate, proteins, tmp_path):
    training = labelled_fasta(tmp_path / "training.fasta", [20 + n for n in range(30)], seed=5)
    config = stored_in(tmp_path, classifier_config(labels=HEADER, source=[str(training)], validation_share=0.0))
    model = export_tiny(tmp_path / "model", config)
    options = ("--evaluate.output", tmp_path / "r", "--evaluate.baselines", "true")
    outcome = evaluate(model, "--evaluate.input", proteins, *options)
    assert outcome.code == 0, outcome.err
    found = evaluation(tmp_path / "r")["baselines"]["majority class"]
    assert "majority class" in outcome.out and found["metrics"]["accuracy"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("kind", ["multiclass", "per_residue"])
def test_without_a_file_the_records_are_those_that_the_run_held_out(evaluate, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    sequences = random_sequences([20 + n for n in range(30)], 5)
    truth = [("CEH" * 20)[: len(text)] if kind == "per_residue" else NAMES[kind][len(text) % 3] for text in sequences]
    training = tmp_path / "training.fasta"
    training.write_text("".join(f">p{n} {truth[n]}\n{text}\n" for n, text in enumerate(sequences)))
    labels = {**HEADER, "split": "hash" if kind == "per_residue" else "stratified"}
    config = classifier_config(kind, labels=labels, source=[str(training)], validation_share=0.3)
    config = stored_in(tmp_path, config)
    model = export_tiny(tmp_path / "model", config)
    outcome = evaluate(model, "--evaluate.baselines", "true")
    assert outcome.code == 0, outcome.err
    found = evaluation(tmp_path / "evaluation-validation")
    labelled = LabelledStore(ensure_labelled_store(config.data, config.model.tokenizer, tmp_path / "runs" / "stores"))
    held_out = labelled.validation.tolist()
    predictions = ClassifierPipeline.load(model, device="cpu").predict([labelled.store.text(n) for n in held_out])
    targets = labelled.targets[held_out]
    if kind == "per_residue":
        targets = np.concatenate([labelled.residue_targets(n) for n in held_out])
    accuracy = np.mean(predictions.probabilities.argmax(1) == targets)
    assert 0 < found["records"] == len(held_out) < 30
    assert found["metrics"]["accuracy"] == pytest.approx(accuracy)
    assert "majority class" in found["baselines"]
    assert evaluate(model, "--evaluate.part", "training", "--evaluate.output", tmp_path / "r").code == 0
    assert evaluation(tmp_path / "r")["records"] == 30 - len(held_out)
    outcome = evaluate(model, "--evaluate.part", "test")
    assert outcome.code == 3 and "no record of part test" in outcome.err


def test_records_that_are_not_evaluated_are_counted_once_by_their_reason(evaluate, tmp_path):
    parts = ["train", "valid", "test"]
    rows = [f"{text},{NAMES['multiclass'][n % 3]},{parts[n // 3]}" for n, text in enumerate(random_sequences(LENGTHS))]
    (tmp_path / "a.csv").write_text("\n".join(["sequence,label,part", *rows, "MKTA,vacuole,valid\n"]))
    labels = {"split": "column", "split_column": "part", "unseen_labels": "skip"}
    config = stored_in(tmp_path, classifier_config(labels=labels, source=[str(tmp_path / "a.csv")]))
    model = export_tiny(tmp_path / "model", config)
    whole = evaluate(model, "--evaluate.part", "all", "--evaluate.output", tmp_path / "whole")
    assert whole.code == 0, whole.err
    assert "9 records, " in whole.out and "1 record unseen label" in whole.out and "other parts" not in whole.out
    part = evaluate(model, "--evaluate.part", "test", "--evaluate.output", tmp_path / "part")
    assert "3 records, " in part.out and "6 records of other parts" in part.out
