"""``python -m benchmarks`` as a user calls it."""

import json
from pathlib import Path

import pytest

from esmeray.benchmarks.__main__ import main
from esmeray.common.errors import ConfigError


def test_a_smoke_run_of_one_stage_writes_its_results_where_it_is_told_to(tmp_path: Path, capsys):
    fasta = tmp_path / "two.fasta"
    fasta.write_text(">a\nMKTAYIAKQRQISF\n>b\nGAVLIPFW\n")
    assert main(["alignment", "--quick", "--output", str(tmp_path / "out"), "--fasta", str(fasta)]) == 0
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [case["stage"] for case in written["cases"]] == ["alignment"] * 3
    assert written["cases"][0]["facts"]["queries"] == 2
    assert "--quick" in written["cases"][0]["command"]
    assert "parasail in a loop" in capsys.readouterr().out


def test_list_shows_the_floors_and_a_misspelt_stage_is_refused(capsys):
    assert main(["--list"]) == 0
    assert "300 on cpu" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean alignment"):
        main(["aligment"])
