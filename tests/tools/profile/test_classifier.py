"""``esmeray profile classifier``: every file is there and says its part; steps can be done one by one."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import matplotlib.image
import pytest
import torch

from tests.classifiers import classifier_config, export_tiny, labelled_fasta

FILES = [
    "baseline_metrics.json",
    "baseline_summary_report.txt",
    "detailed_metrics.csv",
    "esmeray.json",
    "plots/batch_size_comparison.png",
    "plots/metrics_heatmap.png",
    "profiler_traces/stacks.txt",
    "profiler_traces/trace.json",
]
QUICK = ("--runs", 2, "--warmup-runs", 1, "--batch-sizes", 1, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return export_tiny(tmp_path_factory.mktemp("model") / "model", classifier_config(labels={"header_field": 1}))


@pytest.fixture(scope="module")
def proteins(tmp_path_factory) -> Path:
    return labelled_fasta(tmp_path_factory.mktemp("data") / "proteins.fasta", [30, 4, 90, 12, 90, 5])


def metrics(folder: Path) -> dict:
    return json.loads((folder / "baseline_metrics.json").read_text())


def test_every_file_is_there_and_says_what_it_should(command, model, proteins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = command("profile", "classifier", model, "--data", proteins, *QUICK)
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "profile-model"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == FILES
    found = metrics(folder)
    rows = found["steps"]["batch_sizes"]["rows"]
    assert [row["batch_size"] for row in rows] == [1, 4] and found["data"]["samples"] == 6
    for row in rows:
        for name in ("latency_per_sample_ms", "latency_per_batch_ms"):
            assert set(row[name]) == {"mean", "std", "p5", "p50", "p95", "p99"}
    assert "accuracy" in found["steps"]["whole_file"]["metrics"]
    assert found["model"]["parameters"] > 1000 and found["model"]["model_size_mb"] > 0
    with (folder / "detailed_metrics.csv").open(newline="") as file:
        details = [(row["batch_size"], row["run"], row["sequences"]) for row in csv.DictReader(file)]
    assert details == [("1", "1", "1"), ("1", "2", "1"), ("4", "1", "4"), ("4", "2", "4")]
    summary = (folder / "baseline_summary_report.txt").read_text()
    for words in ("Latency per sample", "Highest throughput", "Best batch size", "Memory that it needs", "Accuracy"):
        assert words in summary and "not measured" not in summary, words
    assert summary.strip() in outcome.out
    assert sum(line.strip().startswith(("1.", "2.", "3.")) for line in summary.splitlines()) == 3
    events = json.loads((folder / "profiler_traces" / "trace.json").read_text())["traceEvents"]
    assert {"forward", "tokenize and pack", "aten::linear"} <= {event.get("name") for event in events}
    assert all(0 < bottleneck["share"] < 1 for bottleneck in found["steps"]["trace"]["bottlenecks"])
    stacks = (folder / "profiler_traces" / "stacks.txt").read_text().splitlines()
    assert stacks and all(line.rpartition(" ")[2].isdigit() for line in stacks)
    height, width, _ = matplotlib.image.imread(folder / "plots" / "batch_size_comparison.png").shape
    assert width > height > 500


def test_steps_are_done_one_by_one_and_the_others_stay(command, model, proteins, tmp_path):
    def run(*steps):
        arguments = ("--data", proteins, "--output", tmp_path / "p", *QUICK, "--overwrite", "--steps", *steps)
        outcome = command("profile", "classifier", model, *arguments)
        assert outcome.code == 0, outcome.err
        return metrics(tmp_path / "p")["steps"]

    first = run("batch_sizes")
    assert list(first) == ["batch_sizes"]
    summary = (tmp_path / "p" / "baseline_summary_report.txt").read_text()
    assert "run it with --steps whole_file" in summary and "run it with --steps trace" in summary
    second = run("whole_file", "plots")
    assert second["batch_sizes"] == first["batch_sizes"] and set(second) == {"batch_sizes", "whole_file"}
    assert (tmp_path / "p" / "plots" / "metrics_heatmap.png").exists()
    assert not (tmp_path / "p" / "profiler_traces" / "trace.json").exists()


def test_results_of_another_file_are_not_mixed_and_plots_need_batch_sizes(command, model, proteins, tmp_path):
    common = ("--output", tmp_path / "p", *QUICK)
    outcome = command("profile", "classifier", model, "--data", proteins, *common, "--steps", "plots")
    assert outcome.code == 2 and "--steps batch_sizes plots" in outcome.err
    assert command("profile", "classifier", model, "--data", proteins, *common, "--steps", "batch_sizes").code == 0
    other = labelled_fasta(tmp_path / "other.fasta", [9, 8, 7])
    outcome = command("profile", "classifier", model, "--data", other, *common, "--overwrite", "--steps", "plots")
    assert outcome.code == 2 and "is of another model, file, device or precision" in outcome.err


def test_sizes_that_are_out_of_memory_are_rows_that_say_so(command, model, proteins, tmp_path, monkeypatch):
    from model.tasks.classifier import Classifier

    logits, largest = Classifier.logits, 3

    def limited(self, batch):
        if batch.num_sequences > largest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logits(self, batch)

    monkeypatch.setattr(Classifier, "logits", limited)
    arguments = ("--data", proteins, "--output", tmp_path / "p", *QUICK, "--overwrite")
    outcome = command("profile", "classifier", model, *arguments, "--steps", "batch_sizes", "plots")
    assert outcome.code == 0, outcome.err
    assert metrics(tmp_path / "p")["steps"]["batch_sizes"]["rows"][1] == {
        "batch_size": 4,
        "runs": 0,
        "error": "out of memory",
    }
    assert "Out of memory" in outcome.out and "batch size 4" in outcome.out
    assert "4,,,,,,,,,out of memory" in (tmp_path / "p" / "detailed_metrics.csv").read_text()
    largest = 0
    outcome = command("profile", "classifier", model, *arguments, "--steps", "batch_sizes", "plots")
    assert outcome.code == 0 and "out of memory at every size" in outcome.out, outcome.err


def test_token_budgets_and_files_without_labels(command, model, proteins, tmp_path):
    arguments = ("--data", proteins, "--output", tmp_path / "p", "--runs", 2, "--token-budgets", 40, 200)
    outcome = command(
        "profile", "classifier", model, *arguments, "--unlabelled", "--steps", "batch_sizes", "whole_file"
    )
    assert outcome.code == 0, outcome.err
    found = metrics(tmp_path / "p")["steps"]
    assert [row["batch_tokens"] for row in found["batch_sizes"]["rows"]] == [40, 200]
    assert found["whole_file"]["metrics"] == {} and "labels were not read" in outcome.out


def test_a_folder_that_is_no_classifier_is_refused_before_anything_is_written(command, proteins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = command("profile", "classifier", tmp_path, "--data", proteins)
    assert outcome.code == 2 and "no exported model; give a run of model.task classifier" in outcome.err
    assert list(tmp_path.iterdir()) == []
