"""Training and predicting functions from the command line."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from common.command_line import run
from function.annotations import read_annotations, read_scores
from function.ontology import read_ontology
from inference.function import prediction
from tests.conftest import REPOSITORY
from tools.__main__ import main as esmeray

CONFIG = ("--config", str(REPOSITORY / "train_config/function.yaml"))
SMALL = ["--data.sample.records", "150", "--data.sample.families", "30", "--network.epochs", "3"]
SMALL += ["--network.hidden_size", "16", "--network.min_count", "3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("function")
    assert run(esmeray, ["function", "train", *CONFIG, "--storage_path", str(folder), *SMALL]) == 0
    return folder / "function"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(prediction, "_BLOCK", 8)


def content(folder: Path) -> dict[str, bytes]:
    """What predictions depend on; a store has its time of making."""
    paths = [path for path in folder.rglob("*") if path.is_file() and "sequences" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_run_in_parts_gives_the_bytes_of_one_at_once(trained, tmp_path, command):
    folder = tmp_path / "function"
    shutil.copytree(trained, folder)
    times = {path: path.stat().st_mtime_ns for path in folder.glob("network_b*")}
    for name in ("blend.json", "network_cellular_component.safetensors", "validation_hits.npz"):
        (folder / name).unlink()
    shutil.rmtree(folder / "data")
    outcome = command("function", "train", *CONFIG, "--storage_path", tmp_path, *SMALL)
    assert outcome.code == 0 and "blend" in outcome.out, outcome.err
    assert content(folder) == content(trained)
    assert times == {path: path.stat().st_mtime_ns for path in times}, "a finished network is not trained again"


def test_other_settings_or_another_folder_are_refused(trained, tmp_path, command):
    outcome = command("function", "train", *CONFIG, "--storage_path", trained.parent, *SMALL, "--seed", 3)
    assert outcome.code == 2 and "other settings" in outcome.err
    (tmp_path / "function").mkdir()
    (tmp_path / "function" / "thesis.txt").touch()
    outcome = command("function", "train", *CONFIG, "--storage_path", tmp_path)
    assert outcome.code == 2 and "no run of 'esmeray function train'" in outcome.err


def test_without_a_config_nothing_is_trained(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = command("function", "train")
    assert outcome.code == 2 and "--config train_config/function.yaml" in outcome.err and not any(tmp_path.iterdir())


def test_predictions_are_in_cafas_format_consistent_and_bounded(trained, tmp_path, command):
    ontology = read_ontology(trained / "data" / "terms.obo")
    for part, terms in ("blend", 500), ("blend", 7), ("network", 500), ("homology", 500):
        output = tmp_path / f"{part}{terms}.tsv"
        options = ["--part", part, "--terms", terms, "--output", output]
        outcome = command("function", "predict", trained, trained / "sample" / "test.fasta", *options)
        assert outcome.code == 0, outcome.err
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
    truth = read_annotations(trained / "sample" / "test.tsv", ontology)
    assert set(proteins) <= {protein for some in truth.values() for protein in some.proteins}


def test_a_killed_prediction_resumes_with_the_same_bytes(trained, tmp_path, command, monkeypatch):
    program = "from inference.function import prediction; prediction._BLOCK = 4; from tools.__main__ import *; "
    program += "import sys; sys.exit(main(sys.argv[1:]))"
    arguments = [str(trained), str(trained / "sample" / "test.fasta"), "--output"]
    start = [sys.executable, "-c", program, "function", "predict", *arguments]
    process = subprocess.Popen([*start, str(tmp_path / "killed.tsv")], cwd=REPOSITORY)
    journal = tmp_path / "killed.tsv.partial" / "done.tsv"
    while process.poll() is None and not (journal.is_file() and journal.stat().st_size > 20_000):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    begun = journal.read_bytes()
    assert b"\n\n" in begun and not (tmp_path / "killed.tsv").exists()
    monkeypatch.setattr(prediction, "_BLOCK", 4)
    for name in ("killed.tsv", "whole.tsv"):
        assert command("function", "predict", *arguments, tmp_path / name).code == 0
    assert (tmp_path / "killed.tsv").read_bytes() == (tmp_path / "whole.tsv").read_bytes()


def test_what_cannot_be_predicted_is_one_line(trained, tmp_path, command):
    test = trained / "sample" / "test.fasta"
    outcome = command("function", "predict", tmp_path / "absent", test, "--output", tmp_path / "out.tsv")
    assert outcome.code == 2 and "no finished run" in outcome.err
    (tmp_path / "out.tsv").write_text("mine\n")
    outcome = command("function", "predict", trained, test, "--output", tmp_path / "out.tsv")
    assert outcome.code == 2 and "exists already" in outcome.err
    (tmp_path / "new.tsv.partial").mkdir()
    (tmp_path / "new.tsv.partial" / "job.json").write_text("{}")
    outcome = command("function", "predict", trained, test, "--output", tmp_path / "new.tsv")
    assert outcome.code == 2 and "work of another job (run was" in outcome.err
    shutil.copytree(trained, tmp_path / "damaged")
    (tmp_path / "damaged" / "blend.json").write_text("{")
    outcome = command("function", "predict", tmp_path / "damaged", test, "--output", tmp_path / "none.tsv")
    assert outcome.code == 3 and "blend.json is damaged" in outcome.err
    (tmp_path / "empty.fasta").touch()
    outcome = command("function", "predict", trained, tmp_path / "empty.fasta", "--output", tmp_path / "none.tsv")
    assert outcome.code == 3 and not (tmp_path / "none.tsv.partial").exists()


def test_a_store_is_predicted_as_the_fasta_that_it_was_made_of(trained, tmp_path, command):
    fasta = trained / "sample" / "test.fasta"
    assert command("data", "convert", "--data.source", fasta, "--convert.store", tmp_path / "store").code == 0
    for source, name in (fasta, "fasta.tsv"), (tmp_path / "store", "store.tsv"):
        outcome = command("function", "predict", trained, source, "--output", tmp_path / name)
        assert outcome.code == 0, outcome.err
    assert (tmp_path / "fasta.tsv").read_bytes() == (tmp_path / "store.tsv").read_bytes()


def test_without_a_frequent_term_there_is_no_network_and_it_alone_is_refused(trained, tmp_path, command):
    rare = ["--storage_path", tmp_path, *SMALL, "--network.min_count", 1000]
    outcome = command("function", "train", *CONFIG, *rare)
    assert outcome.code == 0, outcome.err
    assert (
        "network" not in json.loads((tmp_path / "function" / "blend.json").read_text())["biological_process"]["weights"]
    )
    given = [tmp_path / "function", trained / "sample" / "test.fasta", "--output", tmp_path / "out.tsv"]
    assert command("function", "predict", *given).code == 0
    outcome = command("function", "predict", *given, "--overwrite", "--part", "network")
    assert outcome.code == 2 and "the run has naive, homology, neighbours" in outcome.err
    refused = [command("function", "train", *CONFIG, *rare, "--parts", "network", "--name", "alone")]
    classifier = ["--network.classifier", tmp_path / "absent.yaml", "--name", "classified"]
    refused.append(command("function", "train", *CONFIG, *rare, "--parts", "network", *classifier))
    for outcome in refused:
        assert outcome.code == 3 and "error: " in outcome.err and "no term has network.min_count" in outcome.err


def test_embeddings_of_a_model_are_computed_on_the_way_or_read_from_a_store(tmp_path, command, monkeypatch):
    """A model of random weights: its vectors, also of the proteins to predict, come from the embedder."""
    model = ["--embeddings.model", "esm2_t6_8M", "--embeddings.random_weights", "true", "--embeddings.max_length", 20]
    given = ["--storage_path", tmp_path, *SMALL, "--parts", "neighbours", "network", *model]
    outcome = command("function", "train", *CONFIG, *given, "--name", "computed")
    assert outcome.code == 0, outcome.err
    monkeypatch.chdir(tmp_path)
    store = ["--embeddings.store", "computed/embeddings"]
    assert command("function", "train", *CONFIG, *given, *store, "--name", "read").code == 0
    monkeypatch.chdir("/")
    blends = [json.loads((tmp_path / name / "blend.json").read_text()) for name in ("computed", "read")]
    assert blends[0] == blends[1]
    fasta = tmp_path / "few.fasta"
    lines = (tmp_path / "read" / "sample" / "test.fasta").read_text().splitlines(keepends=True)
    fasta.write_text("".join(lines[:6]))
    for name in ("computed", "read"):
        outcome = command("function", "predict", tmp_path / name, fasta, "--output", tmp_path / f"{name}.tsv")
        assert outcome.code == 0, outcome.err
    assert (tmp_path / "computed.tsv").read_bytes() == (tmp_path / "read.tsv").read_bytes()
    assert np.isfinite(blends[0]["biological_process"]["weights"]["network"])
