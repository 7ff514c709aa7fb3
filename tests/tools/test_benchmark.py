"""``python -m tools benchmark``: every stage on a user's store, and advice that the samples support."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.image
import pytest

from tools._benchmark.advice import advise, median_interval, ratio, slowest
from tools._benchmark.measuring import Clock, Done, Row, StageResult, Variant, measure

STAGES = ["reading", "tokenizing", "packing", "inference", "loading", "pipeline"]


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A folder that holds an ESM-2 of one layer."""
    from model.backbones.loading import load_network
    from train_config.schema import BackboneSection

    section = BackboneSection(source="esm2_t6_8M", layers=1, hidden_size=32, heads=2)
    folder = tmp_path / "tiny"
    load_network(section, 0).save_pretrained(folder)
    return folder


@pytest.fixture
def store(command, tmp_path: Path) -> Path:
    records = "".join(f">p{number}\n{'MKTAYIAKQRQISF' * (1 + number % 5)}\n" for number in range(150))
    (tmp_path / "in.fasta").write_text(records)
    assert command("fasta2lmdb", tmp_path / "in.fasta", tmp_path / "store").code == 0
    return tmp_path / "store"


def test_every_stage_is_measured_and_kept_in_the_folder(command, store, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in store.iterdir()}
    outcome = command("benchmark", store, "--model", tiny_model, "--seconds", 1)
    assert outcome.code == 0, outcome.err
    for words in ("Reading the store", "in order", "batch.tokens", "What is slow", "Advice", "% waiting for data"):
        assert words in outcome.out, words
    folder = tmp_path / "benchmark-store"
    facts = json.loads((folder / "benchmark.json").read_text())
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


def test_json_is_one_object_with_the_advice(command, store, tiny_model, tmp_path):
    outcome = command("benchmark", store, "--model", tiny_model, "--seconds", 0.5, "--json", "--output", tmp_path / "o")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out) == json.loads((tmp_path / "o" / "benchmark.json").read_text())
    assert json.loads(outcome.out)["advice"]


def test_a_folder_that_is_no_store_is_refused_before_anything_is_written(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = command("benchmark", tmp_path)
    assert outcome.code == 3
    assert outcome.err.count("\n") == 1
    assert "not a store" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_model_is_a_usage_error(command, store, tmp_path):
    outcome = command("benchmark", store, "--model", "esm2_t6_8N", "--output", tmp_path / "o")
    assert outcome.code == 2
    assert "did you mean esm2_t6_8M" in outcome.err
    assert not (tmp_path / "o").exists()


def test_help_teaches_by_example(command):
    outcome = command("benchmark", "--help")
    assert outcome.code == 0
    assert "python -m tools benchmark uniref50_store --model esm2_t30_150M --seconds 300" in outcome.out


def forward(budget: int, precision: str, *tokens_per_s: float) -> Row:
    return Row(f"{precision} {budget}", {"batch.tokens": budget, "precision": precision}, {"tokens/s": [*tokens_per_s]})


def workers(number: int, tokens_per_s: list[float], waiting: list[float]) -> Row:
    samples = {"tokens/s": tokens_per_s, "% waiting for data": waiting}
    return Row(str(number), {"data.num_workers": number}, samples)


def stages(**rows: list[Row]) -> dict[str, StageResult]:
    return {name: StageResult(name, name, found) for name, found in rows.items()}


def test_a_faster_budget_and_precision_are_advised_where_every_round_agrees():
    rows = [
        forward(2048, "bf16", 30.0, 31.0, 29.0),
        forward(8192, "bf16", 20.0, 20.0, 20.0),
        forward(2048, "fp32", 10.0, 10.0, 10.0),
        forward(8192, "fp32", 9.0, 9.0, 9.0),
    ]
    lines = advise(stages(inference=rows))
    assert lines[0].startswith("training.amp_dtype bf16: the forward does 3.00 times (2.90 to 3.10)")
    assert lines[1].startswith("batch.tokens 8192 -> 2048: the forward does 1.50 times (1.45 to 1.55)")


def test_nothing_is_advised_that_one_of_three_rounds_contradicts():
    rows = [
        forward(2048, "bf16", 30.0, 31.0, 19.0),
        forward(8192, "bf16", 20.0, 20.0, 20.0),
        forward(2048, "fp32", 10.0, 40.0, 10.0),
    ]
    lines = advise(stages(inference=rows))
    assert any(line.startswith("batch.tokens 8192: no other budget") for line in lines)
    assert any("no difference beyond the spread" in line for line in lines)


def test_two_rounds_are_too_few_to_say_anything():
    assert ratio(forward(1, "bf16", 9.0, 9.0), forward(1, "fp32", 1.0, 1.0)) is None


def test_slow_bf16_is_advised_against_by_the_name_that_the_config_has_for_fp32():
    rows = [forward(8192, "bf16", 5.0, 5.0, 5.0), forward(8192, "fp32", 10.0, 10.0, 10.0)]
    assert advise(stages(inference=rows))[0].startswith("training.amp_dtype none: in bf16")


def test_a_loader_process_is_given_up_where_the_model_hardly_waits_without_one():
    rows = [workers(0, [10.0] * 3, [0.2, 0.3, 0.1]), workers(1, [10.0] * 3, [0.1] * 3)]
    assert advise(stages(pipeline=rows)) == [
        "data.num_workers 1 -> 0: without a loader process the model waits 0.20 % of the time (at most 0.30 %), "
        "so there is nothing for one to gain"
    ]


def test_more_loader_processes_are_advised_where_they_are_faster():
    rows = [
        workers(0, [5.0] * 3, [60.0] * 3),
        workers(1, [10.0] * 3, [30.0] * 3),
        workers(2, [15.0, 14.0, 16.0], [2.0] * 3),
    ]
    assert advise(stages(pipeline=rows))[0].startswith("data.num_workers 1 -> 2: the pipeline does 1.50 times")


def test_batches_that_stay_empty_make_the_window_larger():
    inference = [forward(1024, "bf16", 2.0, 2.0, 2.0)]
    packing = [
        Row("", {"batch.tokens": 1024, "batch.packing_window": window}, {"% filled": [filled]})
        for window, filled in ((2048, 90.0), (8192, 97.0))
    ]
    lines = advise(stages(inference=inference, packing=packing))
    assert any(
        line.startswith("batch.packing_window 2048 -> 8192: batches of 1024 tokens are 97.0 %") for line in lines
    )


def test_the_slowest_stage_is_named_in_tokens_whatever_its_unit():
    rows = stages(
        reading=[Row("", {}, {"records/s": [10.0]})],
        inference=[forward(1024, "bf16", 500.0)],
    )
    assert slowest(rows, tokens_per_record=300.0)[0].startswith("inference is the slowest stage, with 500 tokens/s")
    assert slowest(rows, tokens_per_record=30.0)[0].startswith("reading is the slowest stage, with 300 tokens/s")


def test_the_interval_of_few_values_is_all_of_them_and_leaves_strays_out_of_many():
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([*range(1, 24), 1000.0, -1000.0]) == (7, 17)


def test_variants_take_turns_and_one_that_outgrows_the_device_is_left_out_with_a_note():
    import torch

    calls = []

    def work(name: str) -> Done:
        calls.append(name)
        if name == "large":
            raise torch.OutOfMemoryError("no")
        return Done({"things/s": 1.0}, {"%": 50.0})

    variants = [Variant(name, lambda name=name: work(name)) for name in ("a", "large", "b")]
    rows, notes = measure(variants, Clock(60), 1.0, torch.device("cpu"), most_rounds=3)
    assert calls == ["b", "a", "large", "a", "b", "b", "a", "a", "b"]
    assert [(row.name, row.rounds, row.median("%")) for row in rows] == [("a", 3, 50.0), ("b", 3, 50.0)]
    assert notes == ["large: out of the device's memory"]
