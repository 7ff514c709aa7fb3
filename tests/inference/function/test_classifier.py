"""A backbone trained on terms through the classifier's pipeline, from the command line, on a Ray cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from function.ontology import read_ontology
from function.sample import write_sample
from inference.exported import config_of, label_space_of
from inference.function.prediction import predict
from tests.conftest import REPOSITORY
from tests.runs import tiny_config
from train_config.function_schema import FunctionSampleSection
from train_config.loading import dump_config
from train_config.schema import IngestSection


def written(folder: Path, ray_address: str) -> list[str]:
    """Files of one aspect and the settings of a classifier; the command that trains with them."""
    (folder / "made").mkdir()
    write_sample(folder / "made", FunctionSampleSection(records=60, families=12))
    ontology = read_ontology(folder / "made" / "terms.obo")
    terms = set(ontology.aspects["molecular_function"].terms)
    lines = (folder / "made" / "train.tsv").read_text().splitlines(keepends=True)
    (folder / "one.tsv").write_text("".join(line for line in lines if line.split()[1] in terms))
    changes = {"model": {"task": "classifier", "backbone": {"lora": {"rank": 2}}}, "training": {"max_steps": 3}}
    ray = {"address": ray_address, "num_workers": 1}
    (folder / "classifier.yaml").write_text(dump_config(tiny_config(folder, ray=ray, **changes)))
    options = {"storage_path": folder, "parts": "network", "network.min_count": 5}
    options |= {"data.sequences": folder / "made" / "train.fasta", "data.annotations": folder / "one.tsv"}
    options |= {"data.ontology": folder / "made" / "terms.obo", "network.classifier": folder / "classifier.yaml"}
    given = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    return [sys.executable, "-m", "tools", "function", "train", "--config=train_config/function.yaml", *given]


def test_a_backbone_learns_terms_by_lora_and_its_probabilities_are_a_part(ray_address, tmp_path):
    train = written(tmp_path, ray_address)
    done = subprocess.run(train, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "function"
    classifier = run / "classifiers" / "molecular_function"
    config = config_of(classifier)
    assert config.model.backbone.lora.rank == 2 and config.data.labels.kind == "multilabel"
    weights = (run / "classifiers" / "molecular_function_weights.tsv").read_text().splitlines()
    assert {line.split("\t")[0] for line in weights} == set(label_space_of(classifier).names)
    assert all(float(line.split("\t")[1]) >= 1 for line in weights)
    output = tmp_path / "predicted.tsv"
    source = [str(tmp_path / "made" / "test.fasta")]
    predict(run, source, output, terms=500, part="blend", ingest=IngestSection(), overwrite=False)
    assert "EX:" in output.read_text()
