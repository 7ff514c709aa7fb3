"""``python -m benchmarks`` from the command line, and its stages: complete and documented."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import MODULES, load_stages, main, require_packages
from esmeray.common.errors import ConfigError
from tests.benchmarks.harness.toy_stage import toy_stage


def test_a_stage_is_named_after_its_module_and_described_there():
    for name in MODULES:
        (stage,) = load_stages([name])
        assert stage.name == name
        assert len(sys.modules[f"benchmarks.stages.{name}"].__doc__.split()) > 40


@pytest.mark.slow
def test_a_smoke_run_of_one_stage_writes_its_results_to_the_given_folder(tmp_path: Path, capsys):
    fasta = tmp_path / "two.fasta"
    fasta.write_text(">a\nMKTAYIAKQRQISF\n>b\nGAVLIPFW\n")
    assert main(["index", "--quick", "--output", str(tmp_path / "out"), "--fasta", str(fasta)]) == 0
    (table,) = json.loads((tmp_path / "out" / "results.json").read_text())["tables"]
    assert [row["index"] for row in table["rows"]][:2] == ["exact", "compressed"]
    assert table["facts"]["proteins from"] == "two.fasta"
    assert "--quick" in table["command"]
    assert "index exact" in capsys.readouterr().out


def test_a_misspelt_stage_or_a_missing_peer_is_refused(capsys):
    assert main(["--list"]) == 0
    assert "index: indexes of vectors" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no stage is called 'idnex'; there are proteome, index"):
        main(["idnex"])
    stage = replace(toy_stage("service"), packages=("no_such_package",))
    with pytest.raises(ConfigError, match="no_such_package: 'make bench' installs the peers"):
        require_packages([stage])
