import json
import shutil
from collections.abc import Callable
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

LENGTHS = [30, 4, 90, 12, 90, 5, 8, 22, 17]
HEADER = {"header_field": 1}
EVALUATE = ("classify", "evaluate")


@pytest.fixture(scope="module")
def model(artifacts) -> Path:
    return artifacts.classifier


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch) -> None:
    """Skip plots: the tests of the report draw them."""
    monkeypatch.setattr("esmeray.inference.classify.report._draw", lambda *_: [])


@pytest.fixture
def proteins(tmp_path) -> Path:
    return labelled_fasta(tmp_path / "proteins.fasta", LENGTHS)


@pytest.fixture
def evaluate(command, tmp_path, monkeypatch) -> Callable[..., tuple[str, dict]]:
    """Function that evaluates a model to a folder; returns the printed text and the evaluation."""
    monkeypatch.chdir(tmp_path)

    def call(model: Path, folder: str, *options: object) -> tuple[str, dict]:
        output = [] if folder.startswith("evaluation-") else ["--evaluate.output", folder]
        printed = command.done(*EVALUATE, model, *output, *options).out
        return printed, json.loads(Path(folder, "evaluation.json").read_text())

    return call


def stored_in(folder: Path, kind: str = "multiclass", **settings: object) -> Config:
    config = classifier_config(kind, **settings)
    return config.model_copy(update={"run": config.run.model_copy(update={"storage_path": str(folder / "runs")})})


def labelled_store(config: Config) -> LabelledStore:
    run = RunFolder(config.run.storage_path, config.run.name)
    return LabelledStore(ensure_labelled_store(config.data, config.model.tokenizer, run.stores))


def write_checkpoint(config: Config, store_checksum: str) -> None:
    checkpoint = RunFolder(config.run.storage_path, config.run.name).checkpoints / "step-00000001"
    checkpoint.mkdir(parents=True)
    trained_on = {"store_checksum": store_checksum, "config": config.model_dump(mode="json")}
    manifest = a_manifest(1).model_copy(update=trained_on).sealed()
    (checkpoint / "manifest.json").write_text(manifest.model_dump_json())


def records_of(lengths: list[int]) -> list[str]:
    """FASTA records with a label per residue."""
    sequences = random_sequences(lengths, 5)
    return [f">p{n} {('CEH' * 20)[: len(text)]}\n{text}\n" for n, text in enumerate(sequences)]


def test_the_report_of_a_run_is_replaced_only_when_asked(command, model, proteins, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(model, run / "export")
    (run / "metrics.jsonl").touch()
    folder = run / "evaluations" / "proteins"
    printed = command.done(*EVALUATE, run, "--evaluate.input", proteins).out
    found = json.loads((folder / "evaluation.json").read_text())
    assert (found["records"], found["bootstrap"]["samples"]) == (9, 1000)
    report = folder / "report.md"
    for words in ("accuracy", f"{found['metrics']['accuracy']:.3f} [", "mcc"):
        assert words in printed and words in report.read_text(), words
    assert "evaluations/proteins/report.md" in printed
    before = report.stat().st_ino
    again = ("--evaluate.input", proteins, "--evaluate.part", "all")
    command.refused(2, "choose another name or pass --overwrite\n", *EVALUATE, run, *again)
    command.done(*EVALUATE, run / "export", "--evaluate.input", proteins, "--overwrite")
    assert report.stat().st_ino != before
    assert [path.name for path in (run / "evaluations").iterdir()] == ["proteins"]


def test_a_label_that_the_model_does_not_know_is_refused_or_left_out(command, evaluate, model, proteins):
    proteins.write_text(proteins.read_text() + ">strange vacuole\nMKTA\n")
    outcome = command.refused(3, "strange", *EVALUATE, model, "--evaluate.input", proteins)
    assert "'vacuole'" in outcome.err and "--data.labels.unseen_labels skip" in outcome.err
    options = ("--evaluate.input", proteins, "--data.labels.unseen_labels", "skip")
    printed, found = evaluate(model, "r", *options)
    assert "1 record unseen label" in printed and found["records"] == 9


def test_a_part_is_chosen_by_the_split_column(command, evaluate, model, tmp_path):
    parts = ["train", "valid", "test"]
    rows = [f"{text},{NAMES['multiclass'][n % 3]},{parts[n // 3]}" for n, text in enumerate(random_sequences(LENGTHS))]
    Path("a.csv").write_text("\n".join(["sequence,label,part", *rows, ""]))
    test = ("--evaluate.input", "a.csv", "--evaluate.part", "test")
    _, found = evaluate(model, "r", *test, "--data.labels.split", "column", "--data.labels.split_column", "part")
    assert found["records"] == 3
    command.refused(2, "--evaluate.part test of a file needs a split column", *EVALUATE, model, *test)
    kind = ("--data.labels.kind", "regression")
    command.refused(2, "the model was trained for multiclass", *EVALUATE, model, *test, *kind)
    columns = {"label_columns": ["stability", "activity"]}
    numbers = export_tiny(tmp_path / "numbers", classifier_config("regression", labels=columns))
    Path("numbers.csv").write_text("sequence,stability,activity\nMKTA,1,2\n")
    other = ("--evaluate.input", "numbers.csv", "--data.labels.label_columns", "activity", "stability")
    command.refused(2, "the model has stability, activity in this order", *EVALUATE, numbers, *other)
    Path("b.csv").write_text(Path("a.csv").read_text() + "MKTA,vacuole,valid\n")
    labels = {"split": "column", "split_column": "part", "unseen_labels": "skip"}
    own = export_tiny(tmp_path / "own", stored_in(tmp_path, labels=labels, source=[str(tmp_path / "b.csv")]))
    printed, _ = evaluate(own, "whole", "--evaluate.part", "all")
    assert "9 records, " in printed and "1 record unseen label" in printed and "other parts" not in printed
    printed, _ = evaluate(own, "part", "--evaluate.part", "test")
    assert "3 records, " in printed and "6 records of other parts" in printed


def test_cropped_residues_do_not_count(evaluate, tmp_path):
    sequences = random_sequences([30, 5])
    config = classifier_config("per_residue", max_length=20, crop="ends", labels=HEADER)
    model = export_tiny(tmp_path / "model", config)
    letters = ClassifierPipeline.load(model, device="cpu").predict(sequences).labels()
    # All predictions are right, and the cropped residues have another class in the file.
    truth = [text.replace("?", "H") for text in letters]
    assert "?" in letters[0] and set(letters[0]) != {"?", "H"}
    Path("a.fasta").write_text("".join(f">p{n} {truth[n]}\n{text}\n" for n, text in enumerate(sequences)))
    _, found = evaluate(model, "r", "--evaluate.input", "a.fasta")
    assert found["metrics"]["accuracy"] == 1.0 and found["residues"] == 25
    assert found["counts"]["records_cropped"] == 1


def test_records_of_the_training_are_left_out_of_a_second_value(evaluate, tmp_path):
    records = records_of([20 + n for n in range(12)])
    for name, chosen in {"training": records[:8], "new": records[8:], "both": records[5:]}.items():
        Path(f"{name}.fasta").write_text("".join(chosen))
    source = [str(tmp_path / "training.fasta")]
    config = stored_in(tmp_path, "per_residue", labels=HEADER, source=source, validation_share=0.0)
    labelled = labelled_store(config)
    model = export_tiny(tmp_path / "model", config)
    printed, unknown = evaluate(model, "unknown", "--evaluate.input", "both.fasta")
    assert "records: the data of its run are not available" in printed and unknown["in_training"] is None
    assert "| trained on its records | not known" in Path("unknown", "report.md").read_text()
    write_checkpoint(config, labelled.checksum)
    Path("training.fasta").write_text("gone")
    printed, both = evaluate(model, "both", "--evaluate.input", "both.fasta")
    _, new = evaluate(model, "new", "--evaluate.input", "new.fasta")
    assert "not known" not in printed and (both["in_training"], new["in_training"]) == (3, 0)
    assert both["by_identity"]["95–100 %"]["records"] == 3 and "3 of 7 records have near copies" in printed
    rest = both["not_in_training"]
    assert rest["records"] == 4 and rest["metrics"] == new["metrics"] != both["metrics"]
    assert rest["intervals"] == new["intervals"] and "not_in_training" not in new
    report = Path("both", "report.md").read_text()
    assert "3 of the 7 records were in the model's training data." in report and "| model, not trained on" in report


def test_without_a_file_the_records_are_those_that_the_run_held_out(command, evaluate, tmp_path):
    Path("training.fasta").write_text("".join(records_of([20 + n for n in range(30)])))
    labels = {**HEADER, "split": "hash"}
    source = [str(tmp_path / "training.fasta")]
    config = stored_in(tmp_path, "per_residue", labels=labels, source=source, validation_share=0.3)
    model = export_tiny(tmp_path / "model", config)
    _, found = evaluate(model, "evaluation-validation", "--evaluate.baselines", "true")
    labelled = labelled_store(config)
    held_out = labelled.validation.tolist()
    predictions = ClassifierPipeline.load(model, device="cpu").predict([labelled.store.text(n) for n in held_out])
    targets = np.concatenate([labelled.residue_targets(n) for n in held_out])
    assert 0 < found["records"] == len(held_out) < 30
    assert found["metrics"]["accuracy"] == pytest.approx(np.mean(predictions.probabilities.argmax(1) == targets))
    assert "majority class" in found["baselines"]
    _, training = evaluate(model, "r", "--evaluate.part", "training")
    assert training["records"] == 30 - len(held_out)
    Path("new.fasta").write_text("".join(records_of([50 + n for n in range(9)])))
    _, of_file = evaluate(model, "f", "--evaluate.input", "new.fasta", "--evaluate.baselines", "true")
    assert "majority class" in of_file["baselines"], "fitted on what the run was trained on"
    outcome = command(*EVALUATE, model, "--evaluate.part", "test")
    assert outcome.code == 3 and "no test" in outcome.err
    write_checkpoint(config, "0" * 64)  # data that changed after training are not scored as held-out data
    outcome = command(*EVALUATE, model, "--evaluate.output", "changed")
    assert outcome.code == 6 and "was trained on" in outcome.err and "not on its current version" in outcome.err
    assert not Path("changed").exists()
