"""``python -m tools profile_classifier``: every file is there and says its part; steps can be done one by one."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import matplotlib.image
import pytest
import torch

from inference.classifier_profile import spread
from tests.classifiers import classifier_config, export_tiny, labelled_fasta
from tools._profile_classifier import report

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
    outcome = command("profile_classifier", model, "--data", proteins, *QUICK)
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "profile-model"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == FILES
    found = metrics(folder)
    rows = found["steps"]["batch_sizes"]["rows"]
    assert [row["batch_size"] for row in rows] == [1, 4] and found["data"]["samples"] == 6
    for row in rows:
        for name in ("latency_per_sample_ms", "latency_per_batch_ms"):
            assert set(row[name]) == {"mean", "std", "p5", "p50", "p95", "p99"}
    assert "accuracy" in found["steps"]["whole_file"]["figures"]
    assert found["model"]["parameters"] > 1000 and found["model"]["model_size_mb"] > 0
    with (folder / "detailed_metrics.csv").open(newline="") as file:
        details = list(csv.DictReader(file))
    assert [(row["batch_size"], row["run"], row["sequences"]) for row in details] == [
        ("1", "1", "1"),
        ("1", "2", "1"),
        ("4", "1", "4"),
        ("4", "2", "4"),
    ]
    summary = (folder / "baseline_summary_report.txt").read_text()
    for words in ("Latency per sample", "Highest throughput", "Best batch size", "Memory that it needs", "Accuracy"):
        assert words in summary and "not measured" not in summary, words
    assert summary.strip() in outcome.out
    assert sum(line.strip().startswith(("1.", "2.", "3.")) for line in summary.splitlines()) == 3
    events = json.loads((folder / "profiler_traces" / "trace.json").read_text())["traceEvents"]
    assert {"forward", "tokenize and pack", "aten::linear"} <= {event.get("name") for event in events}
    bottlenecks = found["steps"]["trace"]["bottlenecks"]
    times = [bottleneck["self_ms"] for bottleneck in bottlenecks]
    assert times == sorted(times, reverse=True) and all(0 < one["share"] < 1 for one in bottlenecks)
    stacks = (folder / "profiler_traces" / "stacks.txt").read_text().splitlines()
    assert stacks and all(line.rpartition(" ")[2].isdigit() for line in stacks)
    height, width, _ = matplotlib.image.imread(folder / "plots" / "batch_size_comparison.png").shape
    assert width > height > 500


def test_steps_are_done_one_by_one_and_the_others_stay(command, model, proteins, tmp_path):
    def run(*steps):
        arguments = ("--data", proteins, "--output", tmp_path / "p", *QUICK, "--overwrite", "--steps", *steps)
        outcome = command("profile_classifier", model, *arguments)
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
    third = run("trace")
    assert third["whole_file"] == second["whole_file"] and len(third["trace"]["bottlenecks"]) == 3


def test_results_of_another_file_are_not_mixed(command, model, proteins, tmp_path):
    common = ("--output", tmp_path / "p", *QUICK)
    assert command("profile_classifier", model, "--data", proteins, *common, "--steps", "batch_sizes").code == 0
    other = labelled_fasta(tmp_path / "other.fasta", [9, 8, 7])
    outcome = command("profile_classifier", model, "--data", other, *common, "--overwrite", "--steps", "plots")
    assert outcome.code == 2 and "is of another model, file, device or precision" in outcome.err


def test_plots_without_batch_sizes_are_refused(command, model, proteins, tmp_path):
    arguments = ("--data", proteins, "--output", tmp_path / "p", "--steps", "plots")
    outcome = command("profile_classifier", model, *arguments)
    assert outcome.code == 2 and "--steps batch_sizes plots" in outcome.err


def test_sizes_that_are_out_of_memory_are_rows_that_say_so(command, model, proteins, tmp_path, monkeypatch):
    from model.tasks.classifier import Classifier

    logits, largest = Classifier.logits, 3

    def limited(self, batch):
        if batch.num_sequences > largest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logits(self, batch)

    monkeypatch.setattr(Classifier, "logits", limited)
    arguments = ("--data", proteins, "--output", tmp_path / "p", *QUICK, "--overwrite")
    outcome = command("profile_classifier", model, *arguments, "--steps", "batch_sizes", "plots")
    assert outcome.code == 0, outcome.err
    assert metrics(tmp_path / "p")["steps"]["batch_sizes"]["rows"][1] == {
        "batch_size": 4,
        "runs": 0,
        "error": "out of memory",
    }
    assert "Out of memory" in outcome.out and "batch size 4" in outcome.out
    assert "4,,,,,,,,,out of memory" in (tmp_path / "p" / "detailed_metrics.csv").read_text()
    largest = 0
    outcome = command("profile_classifier", model, *arguments, "--steps", "batch_sizes", "plots")
    assert outcome.code == 0, outcome.err
    assert "out of memory at every size" in outcome.out


def test_token_budgets_and_files_without_labels(command, model, proteins, tmp_path):
    arguments = ("--data", proteins, "--output", tmp_path / "p", "--runs", 2, "--token-budgets", 40, 200)
    outcome = command("profile_classifier", model, *arguments, "--unlabelled", "--steps", "batch_sizes", "whole_file")
    assert outcome.code == 0, outcome.err
    found = metrics(tmp_path / "p")["steps"]
    assert [row["batch_tokens"] for row in found["batch_sizes"]["rows"]] == [40, 200]
    assert found["whole_file"]["figures"] == {} and "labels were not read" in outcome.out


def test_a_folder_that_is_no_classifier_is_refused_before_anything_is_written(command, proteins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = command("profile_classifier", tmp_path, "--data", proteins)
    assert outcome.code == 2 and "holds no exported classifier" in outcome.err
    assert list(tmp_path.iterdir()) == []


def row(size: int, latencies_ms: list[float], cpu_mb: float, **changes) -> dict:
    """What a profile says of a batch size, made up."""
    rate = 1e3 * size / latencies_ms[0]
    return {
        "batch_size": size,
        "error": None,
        "latency_per_sample_ms": spread([each / size for each in latencies_ms]),
        "latency_per_batch_ms": spread(latencies_ms),
        "samples_per_s": rate,
        "batches_per_s": rate / size,
        "tokens_per_s": 300 * rate,
        "cpu_memory_peak_mb": cpu_mb,
        "gpu_memory_allocated_mb": None,
        "gpu_memory_peak_mb": None,
        "samples_per_s_per_mb": rate / cpu_mb,
        **changes,
    }


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """What a picture of these rows shows, as a figure."""

    def draw(function: str, rows: list[dict]):
        figures = []
        monkeypatch.setattr(report, "save", lambda figure, _: figures.append(figure))
        getattr(report, function)(tmp_path / "picture.png", rows, "batch_size", "made up")
        figures[0].canvas.draw()
        return figures[0]

    return draw


@pytest.mark.parametrize("memory_mb", [(1310.0, 1312.0, 1319.0), (1310.0, 1310.0, 1310.0)])
def test_nothing_that_is_drawn_touches_the_edge_of_its_panel(drawn, memory_mb):
    rows = [row(4**n, [5.0 * 2**n, 0.1, 9.0], memory) for n, memory in enumerate(memory_mb)]
    panels = drawn("draw_comparison", rows).axes
    assert sum(bool(axes.lines) for axes in panels) == 5  # there is no GPU
    for axes in panels:
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        for line in axes.lines:
            assert left < 0.95 * line.get_xdata().min() and 1.05 * line.get_xdata().max() < right
            assert bottom == 0 <= line.get_ydata().min() and line.get_ydata().max() < 0.95 * top


def test_latencies_have_a_range_that_was_measured(drawn):
    panels = drawn("draw_comparison", [row(1, [1.0, 1.0, 9.0], 100.0), row(2, [2.0, 2.0, 30.0], 100.0)]).axes
    latencies = [axes for axes in panels if axes.get_title(loc="left").startswith("Latency")]
    assert len(latencies) == 2
    for axes in latencies:
        names = {text.get_text() for text in axes.get_legend().get_texts()}
        assert names == {"p50", "p5 to p95", "p99", "mean"} and not axes.containers
        band = axes.collections[0].get_paths()[0].vertices
        assert band[:, 1].min() == pytest.approx(1.0)


def test_the_heatmap_says_which_colour_is_better(drawn):
    rows = [row(1, [5.0], 1310.0), row(4, [9.0], 1319.0), {"batch_size": 64, "error": "out of memory"}]
    axes, scale = drawn("draw_heatmap", rows).axes
    said = [text.get_text().replace("\n", " ") for text in scale.get_yticklabels()]
    assert said == ["worst of its line", "halfway, or all alike", "best of its line"]
    red, green = (axes.images[0].cmap(end) for end in (0.0, 1.0))
    assert red[0] > red[1] and green[1] > green[0]
    lines = [text.get_text() for text in axes.get_yticklabels()]
    shown = axes.images[0].get_array()
    assert shown[lines.index("latency per batch, mean (ms)")].tolist() == [1.0, 0.0, None]
    assert shown[lines.index("samples/s")].tolist() == [0.0, 1.0, None]
    assert shown[lines.index("CPU memory, peak (MB)")].tolist() == [0.5, 0.5, None]
    bold = {text.get_text() for text in axes.texts if text.get_fontweight() == "bold"}
    assert {"5", "444.4"} <= bold and not {"1,310", "1,319", "9"} & bold
