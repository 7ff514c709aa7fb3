"""``esmeray profile model`` reports stages, operators, batch sizes, advice and a trace for any kind of model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from esmeray.train_config.loading import dump_config
from tests.classifiers import labelled_fasta
from tests.inference.embedding.jobs import write_proteins
from tests.model.support import random_sequences
from tests.runs import tiny_config
from tests.tools.conftest import small_measurements, without_stacks

pytestmark = pytest.mark.slow

STAGES = {"read", "tokenize", "pack", "attention", "products", "norm and activation", "pooling", "write"}
NUMBERS = {"esmeray.json", "profile.json", "report.txt"}
QUICK = ("--profile.device", "cpu", "--profile.precision", "fp32")  # without bf16, measuring its products takes minutes


@pytest.fixture(scope="module")
def folder(artifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an embedding model, a classifier, and proteins for both."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "model").symlink_to(artifacts.encoder)
    (folder / "classifier").symlink_to(artifacts.classifier)
    write_proteins(folder / "proteins.fasta", random_sequences([*range(20, 80)]))
    labelled_fasta(folder / "labelled.fasta", [30, 4, 90, 12, 90, 5])
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    small_measurements(monkeypatch)


@pytest.fixture
def profiled(command, folder: Path, tmp_path: Path) -> Callable:
    """Function that profiles a model of the folder; returns the outcome and the profile."""

    def call(model: str, *options: object, proteins: str = "proteins.fasta"):
        given = ("--data.source", folder / proteins, "--profile.output", tmp_path / "out", *QUICK, *options)
        outcome = command("profile", "model", folder / model, *given)
        path = tmp_path / "out" / "profile.json"
        return outcome, json.loads(path.read_text()) if outcome.code == 0 else {}

    return call


def test_time_is_shared_out_among_all_stages(profiled, tmp_path: Path):
    options = ("--profile.tokens", 512, "--profile.batch_sizes", "none")
    outcome, profile = profiled("model", *options)
    assert outcome.code == 0, outcome.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*NUMBERS, "stages.png", "trace.json"}
    stages = profile["stages"]
    assert set(stages) == {*STAGES, "copy to device", "copy back", "rest"}
    assert all(name in outcome.out for name in stages)
    assert sum(stage["share"] for stage in stages.values()) == pytest.approx(1)
    for name in STAGES:
        assert 0 < stages[name]["share"] < 1, name
    for name in ("attention", "products", "norm and activation", "pooling"):
        assert 0 < stages[name]["share_of_limit"] < 3, name
    assert profile["peaks"]["flops_from"] == "measured" and "(measured)" in outcome.out
    assert 3 <= profile["batches"] <= 4 and profile["precision"] == "fp32"
    assert all(line in outcome.out.replace("\n", " ") for line in profile["advice"])
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    traced = {"aten::layer_norm", "aten::gelu", "aten::segment_reduce", "tokenize", "pooling", "write"}
    assert traced <= {event.get("name") for event in events}


def test_classifier_is_profiled_alike_with_its_batch_sizes(profiled, tmp_path: Path, monkeypatch):
    without_stacks(monkeypatch)
    options = ("--data.labels.header_field", 1, "--profile.batch_sizes", 1, 4)
    outcome, profile = profiled("classifier", *options, proteins="labelled.fasta")
    assert outcome.code == 0, outcome.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*NUMBERS, "stages.png"}
    assert profile["task"] == "classifier" and profile["parameters"] > 1000
    assert profile["stages"]["products"]["share"] > 0 and profile["stages"]["pack"]["share"] > 0
    rows = profile["batch_sizes"]
    assert [row["batch_size"] for row in rows] == [1, 4]
    for row in rows:
        assert set(row["latency_per_sample_ms"]) == {"mean", "std", "p5", "p50", "p95", "p99"}
        assert row["cpu_memory_peak_mb"] > 0 and row["gpu_memory_peak_mb"] is None
        assert [run["sequences"] for run in row["runs"]] == [row["batch_size"]] * 2
    assert "Latency per sample" in outcome.out and "Highest throughput" in outcome.out
    assert (tmp_path / "out" / "report.txt").read_text().strip() in outcome.out


def test_sizes_that_are_out_of_memory_are_rows_that_say_so(profiled, monkeypatch):
    without_stacks(monkeypatch)
    from esmeray.model.backbones.base import PackedBackbone

    hidden_states = PackedBackbone.hidden_states_of

    def limited(self, batches, *arguments):
        if batches[0].num_sequences == 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return hidden_states(self, batches, *arguments)

    monkeypatch.setattr(PackedBackbone, "hidden_states_of", limited)
    outcome, profile = profiled("model", "--profile.batch_sizes", 2, 8)
    assert outcome.code == 0, outcome.err
    assert profile["batch_sizes"][1] == {"batch_size": 8, "error": "out of memory", "runs": []}
    assert "out of memory" in outcome.out


@pytest.mark.usefixtures("process_group")
def test_experiment_is_trained_for_some_seconds_and_nothing_is_saved(command, tmp_path: Path):
    config = tiny_config(tmp_path / "runs")
    (tmp_path / "mine.yaml").write_text(dump_config(config))
    outcome = command.done("profile", "model", tmp_path / "mine.yaml", "--profile.output", tmp_path / "out")
    profile = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert profile["tokens_per_s"] > 0 and profile["peak_memory_bytes"] > 0
    assert set(profile["stages"]) == {"data_wait", "forward", "backward", "optimizer"}
    assert "tokens/s" in outcome.out and profile["advice"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*NUMBERS, "trace.json"}
    assert not (tmp_path / "runs" / config.run.name).exists()


def test_what_cannot_be_profiled_is_refused_before_anything_is_written(command, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command.refused(2, "--data.source", "profile", "model", folder / "model")
    command.refused(2, str(tmp_path), "profile", "model", tmp_path, "--data.source", folder / "proteins.fasta")
    assert list(tmp_path.iterdir()) == []
