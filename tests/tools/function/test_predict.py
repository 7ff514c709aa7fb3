"""``train`` and ``function predict`` for protein functions."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from esmeray.common.command_line import INTERRUPTED
from esmeray.common.publishing import RECORD_FILE
from esmeray.function.annotations import read_annotations, read_scores
from esmeray.function.ontology import read_ontology
from esmeray.function.sample import NAMESPACES
from esmeray.function.submission import check_submission
from esmeray.inference.calibration import HELD_OUT
from esmeray.inference.function import prediction
from esmeray.run_folder.checkpoints import CheckpointStore
from esmeray.run_folder.metrics_log import read_metrics
from tests.artifacts import function_training
from tests.damage import killed_in_piece
from tests.dataset.tokenizer_folders import esm
from tests.model.small_models import save_masked_lm
from tests.tools.conftest import next_words

pytestmark = pytest.mark.slow

PARTS = ("naive", "neighbours", "network", "blend", "homology")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Use small blocks of proteins, and skip plots, which other tests draw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "_BLOCK", 8)
        patch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
        yield


@pytest.fixture(scope="module")
def trained(artifacts) -> Path:
    return artifacts.function


def prediction_of(run: Path, source: Path, output: Path, *options: object) -> list[object]:
    """Command line arguments of ``function predict``."""
    return ["function", "predict", run, "--predict.input", source, "--predict.output", output, *options]


def content(run: Path) -> dict[str, bytes]:
    """Files that predictions depend on; the store (creation time) and the card (rounded metrics) are left out."""
    names = ["export/classifier.safetensors", "function/blend.json", "function/vectors.npy", "function/validation.txt"]
    names += [f"function/ranker_{aspect}.npz" for aspect in NAMESPACES]
    return {name: (run / name).read_bytes() for name in names}


def test_run_that_is_interrupted_resumes_with_the_bytes_of_one_at_once(trained, tmp_path, command, monkeypatch):
    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(CheckpointStore, "write_latest", interrupt)
    assert command(*function_training(tmp_path)).code == INTERRUPTED
    outcome = command.done(*function_training(tmp_path))
    assert "blend" in outcome.out and "DeepSpeed" not in outcome.out + outcome.err
    assert next_words(outcome.out)[:3] == ["function", "predict", str(tmp_path / "function")]
    metrics = read_metrics(tmp_path / "function" / "metrics.jsonl")
    assert [record for record in metrics if record.get("event") == "resumed"]
    assert content(tmp_path / "function") == content(trained)
    shutil.rmtree(tmp_path / "function" / "function")
    command.done(*function_training(tmp_path))
    assert content(tmp_path / "function") == content(trained), "the blend is made again alone"


def test_predictions_are_in_cafas_format_consistent_and_bounded(trained, tmp_path, command):
    ontology = read_ontology(trained / "function" / "terms.obo")
    for part, terms in ("ranker", 500), ("ranker", 7), *((part, 500) for part in PARTS):
        output = tmp_path / f"{part}{terms}.tsv"
        options = ["--predict.part", part, "--predict.terms", terms]
        command.done(*prediction_of(trained, trained / "function" / "sample" / "test.fasta", output, *options))
        rows = [line.split("\t") for line in output.read_text().splitlines()]
        assert all(len(score) == 5 and 0 < float(score) <= 1 for _, _, score in rows)
        proteins = list(dict.fromkeys(protein for protein, _, _ in rows))
        counts = {protein: sum(row[0] == protein for row in rows) for protein in proteins}
        assert max(counts.values()) <= terms
        for name, scores in read_scores(output, ontology, dict.fromkeys(ontology.aspects, proteins)).items():
            child, parent = ontology.aspects[name].parents.nonzero()
            dense = scores.toarray()
            assert (dense[:, child] <= dense[:, parent]).all()
        assert not output.with_name(f"{output.name}.partial").exists()
    truth = read_annotations(trained / "function" / "sample" / "test.tsv", ontology)
    assert set(proteins) <= {protein for some in truth.values() for protein in some.proteins}


def test_sets_contain_the_terms_at_the_rate_that_was_asked_for(trained, tmp_path, command, caplog, monkeypatch):
    sample, output = trained / "function" / "sample", tmp_path / "sets.tsv"
    command.done(*prediction_of(trained, sample / "test.fasta", output, "--predict.coverage", 0.8))
    assert HELD_OUT in caplog.text
    truth = read_annotations(sample / "test.tsv", read_ontology(trained / "function" / "terms.obo"))
    pairs = {tuple(line.split("\t")[:2]) for line in output.read_text().splitlines()}
    for name, aspect in truth.items():
        terms = read_ontology(trained / "function" / "terms.obo").aspects[name].terms
        rows, columns = aspect.terms.nonzero()
        covered = [(aspect.proteins[row], terms[column]) in pairs for row, column in zip(rows, columns, strict=True)]
        assert np.mean(np.bincount(rows, covered) / np.bincount(rows)) > 0.7, name
    options = ("--predict.coverage", 0.8, "--overwrite")
    command.refused(
        2, "sets are of the ranker", *prediction_of(trained, output, output, *options, "--predict.part", "blend")
    )
    copy = shutil.copytree(trained, tmp_path / "copy")
    evaluate = ["function", "evaluate", copy, "--evaluate.truth", sample / "test.tsv", "--evaluate.input"]
    caplog.clear()
    monkeypatch.setattr(prediction, "COVERAGE", 0.8)  # the sample's proteins have too many new terms for 0.9
    written = tmp_path / "evaluation"
    options_of_run = ("--evaluate.calibrate", "true", "--evaluate.output", written)
    outcome = command.done(*evaluate, sample / "test.fasta", *options_of_run)
    assert "coverage" in outcome.out and (written / f"reliability_{name}.png").is_file()
    errors = pd.read_csv(written / "probabilities_by_aspect.tsv", sep="\t")
    assert (errors["error_of_probability"] < errors["error_of_score"] + 0.01).all()
    calibrated = json.loads((copy / "function" / f"calibration_{name}.json").read_text())
    assert calibrated["records"] == len(aspect.proteins) and calibrated["fingerprint"] and not calibrated["held_out"]
    command.done(*prediction_of(copy, sample / "test.fasta", output, *options))
    assert HELD_OUT not in caplog.text
    evaluate[4] = sample / "train.tsv"
    command.refused(3, "are in the run's data", *evaluate, sample / "train.fasta")
    (copy / "function" / f"calibration_{name}.json").unlink()
    command.refused(2, "the model is not calibrated", *prediction_of(copy, sample / "test.fasta", output, *options))


def test_a_cafa_6_submission_is_the_predictions_without_roots(trained, tmp_path, command):
    ontology = read_ontology(trained / "function" / "terms.obo")
    source = trained / "function" / "sample" / "test.fasta"
    for name in ("cafa", "cafa6"):
        command.done(*prediction_of(trained, source, tmp_path / name, "--predict.format", name))
    check_submission(tmp_path / "cafa6", ontology)
    roots = {aspect.terms[0] for aspect in ontology.aspects.values()}
    lines = (tmp_path / "cafa").read_text().splitlines()
    others = [line for line in lines if line.split("\t")[1] not in roots]
    assert len(lines) > len(others)
    assert (tmp_path / "cafa6").read_text().splitlines() == others, "the sample has no 500 terms of a protein"
    more = prediction_of(trained, source, tmp_path / "more.tsv", "--predict.format", "cafa6", "--predict.terms", 1501)
    command.refused(2, "cafa6 allows at most 1,500 per protein", *more)


def test_a_killed_prediction_resumes_with_the_same_bytes(trained, tmp_path, command):
    fasta = trained / "function" / "sample" / "test.fasta"
    command.done("data", "convert", "--data.source", fasta, "--convert.store", tmp_path / "store")
    with killed_in_piece(2):
        assert command(*prediction_of(trained, fasta, tmp_path / "killed.tsv")).code == INTERRUPTED
    assert not (tmp_path / "killed.tsv").exists()
    for source, name in (fasta, "killed.tsv"), (tmp_path / "store", "whole.tsv"):
        command.done(*prediction_of(trained, source, tmp_path / name))
    assert (tmp_path / "killed.tsv").read_bytes() == (tmp_path / "whole.tsv").read_bytes()


def test_what_cannot_be_predicted_is_one_line(trained, tmp_path, command):
    test = trained / "function" / "sample" / "test.fasta"
    command.refused(2, "not a finished run", *prediction_of(tmp_path / "absent", test, tmp_path / "out.tsv"))
    (tmp_path / "new.tsv.partial").mkdir()
    (tmp_path / "new.tsv.partial" / "job.json").write_text("{}")
    new = prediction_of(trained, test, tmp_path / "new.tsv")
    command.refused(2, "new.tsv.partial: already exists", *new)
    (tmp_path / "new.tsv.partial" / RECORD_FILE).write_text("predict_function")
    command.refused(2, "work of another job (run was", *new)
    shutil.copytree(trained, tmp_path / "damaged")
    for name in ("blend.json", "vectors.npy", "annotations.tsv"):
        path = tmp_path / "damaged" / "function" / name
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        words = f"{name}: damaged: its checksum"
        command.refused(3, words, *prediction_of(tmp_path / "damaged", test, tmp_path / "none.tsv"))
        shutil.copy2(trained / "function" / name, path)
    (tmp_path / "empty.fasta").touch()
    outcome = command(*prediction_of(trained, tmp_path / "empty.fasta", tmp_path / "none.tsv"))
    assert outcome.code == 3 and not (tmp_path / "none.tsv.partial").exists()


def test_embeddings_are_computed_or_read_from_a_store(tmp_path, command, monkeypatch):
    """The embedder computes the vectors of the model, also for the proteins to predict."""
    prefix = "--model.terms.embeddings."
    save_masked_lm(esm(tmp_path / "model"), "esm", vocab_size=33)
    model = [f"{prefix}model", tmp_path / "model", f"{prefix}max_length", 20]
    few = ["--data.sample.records", 60, "--data.sample.families", 12, "--training.max_steps", 2]
    options = [*function_training(tmp_path), *few, "--model.terms.parts", "neighbours", "network", *model]
    command.done(*options, "--run.name", "computed")
    (store,) = (tmp_path / "stores").glob("*-embeddings-*")
    monkeypatch.chdir(store.parent)
    assert command(*options, f"{prefix}store", store.name, "--run.name", "read").code == 0
    monkeypatch.chdir("/")
    blends = [json.loads((tmp_path / name / "function" / "blend.json").read_text()) for name in ("computed", "read")]
    assert blends[0] == blends[1]
    fasta = tmp_path / "few.fasta"
    lines = (tmp_path / "read" / "function" / "sample" / "test.fasta").read_text().splitlines(keepends=True)
    fasta.write_text("".join(lines[:6]))
    for name in ("computed", "read"):
        command.done(*prediction_of(tmp_path / name, fasta, tmp_path / f"{name}.tsv"))
    assert (tmp_path / "computed.tsv").read_bytes() == (tmp_path / "read.tsv").read_bytes()
    assert np.isfinite(blends[0]["biological_process"]["weights"]["network"])
