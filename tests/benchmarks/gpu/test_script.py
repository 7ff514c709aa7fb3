"""The GPU script runs on a CPU: every part runs, and its rows are written."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.gpu import bench, parts, training
from benchmarks.gpu.script import PARTS
from esmeray.common import timing

pytestmark = pytest.mark.slow

TRIED = ["gpu", "--device", "cpu", "--sizes", "tiny", "--tokens", "512", "--backend", "eager"]


def test_every_part_runs_and_is_written(tmp_path, monkeypatch):
    ways = (training.Variant("selective", checkpointing="selective"), training.Variant("graph", graph=True))
    monkeypatch.setattr(training, "VARIANTS", ways)
    monkeypatch.setattr(bench, "MICRO_BATCHES", 1)
    monkeypatch.setattr(bench, "LONGEST", 256)  # a CPU without bf16 takes minutes for the GPU's sizes
    for module in (bench, training):
        monkeypatch.setattr(module, "WARM_UPS", 1)
    for module in (parts, training):
        monkeypatch.setattr(module, "median_seconds", lambda work: timing.timed(work)[1])
    assert main([*TRIED, "--output", str(tmp_path)]) == 0
    tables = {table["stage"]: table["rows"] for table in json.loads((tmp_path / "results.json").read_text())["tables"]}
    assert list(tables) == list(PARTS)
    assert {row["verdict"] for row in tables["correctness"]} == {"ok"}
    timed = [row for name in ("training", "forward") for row in tables[name]]
    assert all(row["tokens/s"] > 0 for row in timed if "verdict" not in row)
    assert [row["verdict"] for row in timed if "verdict" in row] == ["not on this device"]
    kinds = [row for row in tables["profile"] if row["kernel"] == "all of them"]
    assert {row["layers"] for row in kinds} == {"eager", "compiled"}
    assert sum(row["share"] for row in kinds) == pytest.approx(2)
    page = (tmp_path / "results.md").read_text()
    assert all(f"## {name}" in page for name in PARTS)


@pytest.mark.parametrize("options", [["--part", "trainin"], ["--sizes", "7M"]])
def test_an_unknown_part_or_size_is_refused(options, capsys):
    with pytest.raises(SystemExit):
        main([*TRIED, *options])
    assert f"invalid choice: '{options[1]}' (choose from" in capsys.readouterr().err
