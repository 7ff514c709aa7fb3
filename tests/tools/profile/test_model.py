"""``esmeray profile model`` on the CPU: stages, limits, advice and the files of the trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monitoring.advice import Facts, advise
from tests.inference.embedding.jobs import small_model_folder, write_proteins
from tests.model.support import random_sequences

STAGES = {"tokenize", "copy to device", "attention", "products", "norm and activation", "pooling", "copy back", "write"}


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    model = small_model_folder(tmp_path / "model")
    fasta = write_proteins(tmp_path / "proteins.fasta", random_sequences([*range(20, 80)]))
    options = ["--model", str(model), "--input", str(fasta), "--output", str(tmp_path / "out"), "--device", "cpu"]
    return ["profile", "model", *options, "--batches", "3", "--tokens", "512"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_time_is_shared_out_among_all_stages(command, given: list[str], tmp_path: Path, precision: str):
    outcome = command(*given, "--precision", precision)
    assert outcome.code == 0, outcome.err
    names = ["esmeray.json", "profile.json", "stacks.txt", "trace.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    profile = json.loads((tmp_path / "out" / "profile.json").read_text())
    stages = profile["stages"]
    assert set(stages) == {*STAGES, "rest"} and all(name in outcome.out for name in stages)
    assert sum(stage["share"] for stage in stages.values()) == pytest.approx(1)
    for name in STAGES - {"copy to device", "copy back"}:
        assert 0 < stages[name]["share"] < 1, name
    for name in ("attention", "products", "norm and activation", "pooling"):
        assert 0 < stages[name]["share_of_limit"] < 3, name
    assert profile["peaks"]["flops_from"] == "measured" and "(measured)" in outcome.out
    assert 3 <= profile["batches"] <= 4 and profile["precision"] == precision
    assert all(line in outcome.out.replace("\n", " ") for line in profile["advice"])


def test_the_trace_holds_operators_and_ranges_and_the_stacks_are_for_a_flame_graph(
    command, given: list[str], tmp_path: Path
):
    assert command(*given, "--precision", "fp32").code == 0
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    operators = {"aten::linear", "aten::layer_norm", "aten::gelu", "aten::segment_reduce"}
    assert {*operators, "tokenize", "pooling", "write"} <= {event.get("name") for event in events}
    stacks = (tmp_path / "out" / "stacks.txt").read_text().splitlines()
    assert stacks and all(line.rpartition(" ")[2].isdigit() for line in stacks)


def test_an_output_that_exists_is_refused_unless_this_command_made_it(command, given: list[str], tmp_path: Path):
    assert command(*given).code == 0
    outcome = command(*given)
    assert outcome.code == 2 and "pass --overwrite" in outcome.err
    assert command(*given, "--overwrite").code == 0
    (tmp_path / "out" / "mine.txt").write_text("a thesis")
    outcome = command(*given, "--overwrite")
    assert outcome.code == 2 and "mine.txt" in outcome.err


def test_a_gpu_that_is_not_there_is_one_line(command, given: list[str], tmp_path: Path, monkeypatch):
    monkeypatch.setattr("inference.embedding.job.local_resources", lambda: [])
    outcome = command(*given[:-6], "--device", "cuda")
    assert outcome.code == 4 and "there is no GPU here" in outcome.err
    assert not (tmp_path / "out").exists()


def test_advice_on_embeddings_offers_its_own_options():
    facts = Facts(model_waits=0.5, attention=0.6, products_of_peak=0.2)
    assert [found.topic for found in advise(facts)] == ["attention", "model waits", "products"]
    assert all("--" in str(found) for found in advise(facts))
    assert advise(Facts(model_waits=0.01, attention=0.3, products_of_peak=0.8)) == []
