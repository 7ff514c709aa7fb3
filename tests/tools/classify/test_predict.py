import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from esmeray.inference.classifier import ClassifierPipeline
from tests.classifiers import classifier_config, export_tiny, labelled_fasta
from tests.model.support import random_sequences
from tests.tools.conftest import Outcome

LENGTHS = [30, 1, 90, 12, 90, 5]


@pytest.fixture(scope="module")
def model(artifacts) -> Path:
    return artifacts.classifier


@pytest.fixture
def proteins(tmp_path) -> Path:
    return labelled_fasta(tmp_path / "proteins.fasta", LENGTHS)


@pytest.fixture
def predict(command, tmp_path) -> Callable[..., Outcome]:
    """Predict for a file and write ``output`` to the test's folder; ``refused``: expected exit code and message."""

    def call(model: Path, file: Path, output: str, *options: object, refused: tuple[int, str] | None = None):
        words = ("classify", "predict", model, "--predict.input", file, "--predict.output", tmp_path / output)
        return command.done(*words, *options) if refused is None else command.refused(*refused, *words, *options)

    return call


def rows(path: Path, delimiter=",") -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def test_the_rows_are_those_of_the_pipeline_whatever_the_batches(predict, model, proteins, tmp_path):
    expected = ClassifierPipeline.load(model, device="cpu").predict(random_sequences(LENGTHS))
    for budget in (64, 8192):
        outcome = predict(model, proteins, f"{budget}.csv", "--predict.tokens", budget)
        found = rows(tmp_path / f"{budget}.csv")
        assert list(found[0]) == ["id", "label", *(f"probability_{name}" for name in expected.label_space.names)]
        assert [row["id"] for row in found] == [f"p{number}" for number in range(6)]
        assert [row["label"] for row in found] == expected.labels()
        numbers = np.array([list(row.values())[2:] for row in found], dtype=float)
        np.testing.assert_allclose(numbers, expected.probabilities, rtol=0, atol=1e-5)
    assert "6 predictions" in outcome.out and "all records read unchanged" in outcome.out


def test_chunks_of_a_table_keep_the_order_in_each_format(predict, model, proteins, tmp_path, monkeypatch):
    predict(model, proteins, "a.parquet")
    monkeypatch.setattr("esmeray.inference.classify.calls.CHUNK_CHARACTERS", 1)
    monkeypatch.setattr("esmeray.dataset.table.PART_ROWS", 2)
    lines = "".join(f"p{number},{text}\n" for number, text in enumerate(random_sequences(LENGTHS)))
    (tmp_path / "table.csv").write_text("name,sequence\n" + lines)
    predict(model, tmp_path / "table.csv", "a.tsv", "--data.labels.id_column", "name")
    table, text = pq.read_table(tmp_path / "a.parquet").to_pylist(), rows(tmp_path / "a.tsv", "\t")
    for exact, shown in zip(table, text, strict=True):
        assert (exact["id"], exact["label"]) == (shown["id"], shown["label"])
        assert float(shown["probability_nucleus"]) == pytest.approx(exact["probability_nucleus"], rel=1e-5)


def test_regression_writes_numbers_and_per_residue_letters(predict, proteins, tmp_path):
    labels = {"label_columns": ["stability", "activity"]}
    model = export_tiny(tmp_path / "numbers", classifier_config("regression", labels=labels))
    predict(model, proteins, "numbers.csv")
    assert list(rows(tmp_path / "numbers.csv")[0]) == ["id", "predicted_stability", "predicted_activity"]
    model = export_tiny(tmp_path / "model", classifier_config("per_residue", max_length=20))
    labelled_fasta(proteins, [30, 5], "per_residue")
    for name in ("a.csv", "a.parquet"):
        outcome = predict(model, proteins, name)
    assert "1 longer than 20 tokens, cropped" in outcome.out
    found, exact = rows(tmp_path / "a.csv"), pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [len(row["label"]) for row in found] == [30, 5] and found[0]["label"].endswith("?" * 10)
    numbers = [float(number) for number in found[0]["probability_H"].split()]
    assert len(numbers) == len(exact[0]["probability_H"]) == 30 and np.isnan(numbers[20:]).all()
    np.testing.assert_allclose(numbers, exact[0]["probability_H"], atol=1e-5)


def test_what_fails_half_way_leaves_what_was_there(predict, model, tmp_path, monkeypatch):
    monkeypatch.setattr("esmeray.inference.classify.calls.CHUNK_CHARACTERS", 1)
    monkeypatch.setattr("esmeray.dataset.table.PART_ROWS", 1)
    (tmp_path / "a.csv").write_text("sequence\nMKTA\nM1\n")
    (tmp_path / "good.csv").write_text("sequence\nMKTA\n")
    predict(model, tmp_path / "good.csv", "out.csv")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    predict(model, tmp_path / "a.csv", "out.csv", "--overwrite", refused=(3, "row 2"))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "a.csv").write_text("sequence\nMKTA\nMK\n")
    predict(model, tmp_path / "a.csv", "out.csv", "--overwrite")
    assert len(rows(tmp_path / "out.csv")) == 2


def test_what_cannot_be_read_is_one_line_with_the_option_to_give(predict, model, proteins, tmp_path):
    predict(model, proteins, "a.txt", refused=(2, "must end in .csv or .tsv or .parquet"))
    table = tmp_path / "a.csv"
    table.write_text("name,protein\nx,MKTA\n")
    options = ("--data.labels.text_column", "protein", "--data.labels.id_column", "id")
    absent = (3, "no column 'id'; it has 'name', 'protein'")
    outcome = predict(model, table, "out.csv", *options, refused=absent)
    assert outcome.err.endswith("e.g. --data.labels.id_column name\n")
    outcome = predict(model, table, "out.csv", refused=(3, "no column 'sequence'"))
    assert "e.g. --data.labels.text_column " in outcome.err
