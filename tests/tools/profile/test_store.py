"""``esmeray profile store``: every stage on a user's store, and advice that the samples support."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import matplotlib.image
import pytest
import torch

from monitoring.advice import advise
from tools.profile._store.report import adviser_facts
from tools.profile._store.subject import Row, StageResult, Subject, Variant
from train_config.schema import BackboneSection

STAGES = ["reading", "tokenizing", "packing", "inference", "loading", "pipeline"]


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A folder that holds an ESM-2 of one layer."""
    from model.backbones.loading import load_network

    section = BackboneSection(source="esm2_t6_8M", layers=1, hidden_size=32, heads=2)
    folder = tmp_path / "tiny"
    load_network(section, 0).save_pretrained(folder)
    return folder


@pytest.fixture
def store(command, tmp_path: Path) -> Path:
    records = "".join(f">p{number}\n{'MKTAYIAKQRQISF' * (1 + number % 5)}\n" for number in range(150))
    (tmp_path / "in.fasta").write_text(records)
    assert (
        command("data", "convert", "--data.source", tmp_path / "in.fasta", "--convert.store", tmp_path / "store").code
        == 0
    )
    return tmp_path / "store"


def test_every_stage_is_measured_and_kept_in_the_folder(command, store, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in store.iterdir()}
    outcome = command("profile", "store", store, "--model", tiny_model, "--seconds", 1)
    assert outcome.code == 0, outcome.err
    for words in ("in order", "precision fp32, 1,024 tokens", "What is slow", "Advice", "% waiting for data"):
        assert words in outcome.out, words
    folder = tmp_path / "benchmark-store"
    facts = json.loads((folder / "benchmark.json").read_text())
    assert facts["advice"] and facts["slow"]
    assert list(facts["stages"]) == STAGES
    assert (facts["records"], facts["longest_tokens"]) == (150, 72)
    for name, stage in facts["stages"].items():
        assert stage["variants"], name
        for variant in stage["variants"]:
            assert all(measured["low"] <= measured["median"] for measured in variant["measured"].values())
    assert {row["settings"]["data.num_workers"] for row in facts["stages"]["pipeline"]["variants"]} == {0, 1, 2}
    height, width, _ = matplotlib.image.imread(folder / "benchmark.png").shape
    assert width > height > 300
    assert sorted(path.name for path in folder.iterdir()) == ["benchmark.json", "benchmark.png", "esmeray.json"]
    assert {path: path.read_bytes() for path in store.iterdir()} == before


def test_json_is_one_object(command, store, tmp_path, monkeypatch):
    monkeypatch.setattr("tools.profile.store.measured", lambda *_: ({"advice": ["leave the settings"]}, []))
    outcome = command("profile", "store", store, "--json", "--output", tmp_path / "o")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out) == json.loads((tmp_path / "o" / "benchmark.json").read_text())


def test_a_folder_that_is_no_store_is_refused_before_anything_is_written(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = command("profile", "store", tmp_path)
    assert outcome.code == 3
    assert outcome.err.count("\n") == 1
    assert "not a store" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_model_is_a_usage_error(command, store, tmp_path):
    outcome = command("profile", "store", store, "--model", "esm2_t6_8N", "--output", tmp_path / "o")
    assert outcome.code == 2
    assert "did you mean esm2_t6_8M" in outcome.err
    assert not (tmp_path / "o").exists()


def forward(budget: int, precision: str, *rates: float) -> Row:
    return Row("", {"batch.tokens": budget, "training.precision": precision}, {"tokens/s": [*rates]})


def workers(number: int, *rates: float) -> Row:
    return Row("", {"data.num_workers": number}, {"tokens/s": [*rates]})


def packed(window: int, filled: float) -> Row:
    return Row("", {"batch.packing_window": window}, {"tokens/s": [9e9] * 3, "% filled": [filled] * 3})


FORWARD = [
    forward(2048, "bf16", 30.0, 31.0, 29.0),
    forward(8192, "bf16", 20.0, 20.0, 20.0),
    forward(2048, "fp32", 60.0, 62.0, 58.0),
    forward(8192, "fp32", 9.0, 9.0, 9.0),
]


def advice(inference: list[Row] = FORWARD, **rows: list[Row]) -> list[str]:
    stages = {"inference": inference, "packing": [packed(2048, 99.0)], "pipeline": [workers(1, 1.0)], **rows}
    results = {name: StageResult(name, name, found, []) for name, found in stages.items()}
    return [str(line) for line in advise(adviser_facts(results))]


def test_faster_settings_and_the_slowest_stage_are_advised_by_the_keys_and_values_of_the_config():
    lines = advice(
        packing=[packed(2048, 90.0), packed(8192, 99.0)],
        pipeline=[workers(0, 5.0, 5.0, 5.0), workers(1, 10.0, 10.0, 10.0), workers(2, 15.0, 14.0, 16.0)],
        reading=[Row("", {}, {"tokens/s": [30.0]})],
    )
    for words in (
        "training.precision fp32 has 2.00 times (2.00 to 2.00) the speed of bf16: set training.precision: fp32",
        "batch.tokens 2048 has 6.67 times (6.44 to 6.89) the speed of 8192: set batch.tokens: 2048",
        "data.num_workers 2 has 1.50 times (1.40 to 1.60) the speed of 1: set data.num_workers: 2",
        "batch.packing_window 8192 has 1.10 times (1.10 to 1.10) the speed of 2048: set batch.packing_window: 8192",
        "reading is the slowest stage with 30 tokens/s; the next, inference, has 60",
    ):
        assert words in lines


@pytest.mark.parametrize("other", [(30.0, 31.0, 19.0), (30.0, 31.0)])
def test_nothing_is_advised_that_one_round_contradicts_or_that_two_rounds_alone_show(other):
    lines = advice([forward(2048, "bf16", *other), forward(8192, "bf16", 20.0, 20.0, 20.0)])
    assert len(lines) == 1 and "slowest stage" in lines[0]


def test_a_variant_that_is_out_of_memory_is_left_out_with_a_note():
    def sample(name: str) -> dict[str, float]:
        if name == "large":
            raise torch.OutOfMemoryError("no")
        return {"tokens/s": 1.0}

    variants = [Variant(name, {}, partial(sample, name)) for name in ("a", "large", "b")]
    subject = Subject(None, BackboneSection(), 1, torch.device("cpu"), seconds=0.1)
    stage = subject.measure("reading", "", variants)
    assert {row.name for row in stage.rows} == {"a", "b"} and stage.rows[0].rounds >= 3
    assert stage.notes == ["large: out of the device's memory"]
