"""The GPU script, tried without a GPU: every part runs, and what it finds is written."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.gpu import production
from benchmarks.gpu.script import PARTS
from common.errors import ConfigError

NO_TORCHAO = "training.fp8 needs torchao: pip install torchao"
TRIED = ["gpu", "--device", "cpu", "--sizes", "tiny", "--tokens", "2048", "--backend", "eager"]


def test_every_part_runs_and_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(production, "find_spec", lambda name: None)  # what it starts has its own tests
    assert main([*TRIED, "--output", str(tmp_path)]) == 0
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert list(parts) == list(PARTS)
    assert all(part["rows"] and part["error"] is None for part in parts.values())
    assert {row["verdict"] for row in parts["correctness"]["rows"][:-1]} == {"ok"}
    timed = [row for name in ("training", "forward", "budgets") for row in parts[name]["rows"]]
    assert all(row["tokens/s"] > 0 for row in timed if "verdict" not in row)
    assert {row["verdict"] for row in timed if "verdict" in row} <= {"not on this device", NO_TORCHAO}
    assert len(timed) > 10
    kinds = [row for row in parts["profile"]["rows"] if row["kernel"] == "all of them"]
    assert {row["layers"] for row in kinds} == {"eager", "compiled"}
    assert sum(row["share"] for row in kinds) == pytest.approx(2)
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"## {name}" in page for name in PARTS)


def test_part_that_breaks_is_written_and_the_next_is_run(tmp_path, monkeypatch, capsys):
    def broken(bench):
        yield {"what": "before it broke"}
        raise RuntimeError("injected")

    monkeypatch.setitem(PARTS, "training", broken)
    assert main([*TRIED, "--part", "training", "ceilings", "--output", str(tmp_path)]) == 1
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert parts["training"]["rows"] == [{"what": "before it broke"}]
    assert "injected" in parts["training"]["error"]
    assert parts["ceilings"]["error"] is None
    assert "broken or wrong: training" in capsys.readouterr().err


def test_part_or_size_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no part 'trainin' \\(did you mean training\\?\\)"):
        main([*TRIED, "--part", "trainin"])
