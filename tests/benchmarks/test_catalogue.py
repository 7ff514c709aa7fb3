"""``python -m benchmarks`` as a user calls it, and its stages: complete, documented, with the floors that were set."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import MODULES, load_stages, main, require_packages
from esmeray.common.errors import ConfigError
from tests.benchmarks.harness.toy_stage import toy_stage


def test_a_stage_is_named_as_its_module_says_what_it_measures_and_has_floors_on_a_cpu():
    for name in MODULES:
        (stage,) = load_stages([name])
        assert stage.name == name
        assert len(sys.modules[f"benchmarks.stages.{name}"].__doc__.split()) > 40
        rows = [(c.case, c.ours, c.peer_name) for c in stage.comparisons]
        assert len(rows) == len(set(rows))


def test_a_smoke_run_of_one_stage_writes_its_results_where_it_is_told_to(tmp_path: Path, capsys):
    fasta = tmp_path / "two.fasta"
    fasta.write_text(">a\nMKTAYIAKQRQISF\n>b\nGAVLIPFW\n")
    assert main(["alignment", "--quick", "--output", str(tmp_path / "out"), "--fasta", str(fasta)]) == 0
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [case["stage"] for case in written["cases"]] == ["alignment"] * 3
    assert written["cases"][0]["facts"]["queries"] == 2
    assert "--quick" in written["cases"][0]["command"]
    assert "parasail in a loop" in capsys.readouterr().out


def test_list_shows_the_floors_and_a_misspelt_stage_or_a_missing_peer_is_refused(capsys):
    assert main(["--list"]) == 0
    assert "300 on cpu" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean alignment"):
        main(["aligment"])
    stage = replace(toy_stage("conversion"), packages=("no_such_package",))
    with pytest.raises(ConfigError, match="no_such_package: 'make bench' installs the peers"):
        require_packages([stage])
