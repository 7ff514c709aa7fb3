"""``python -m benchmarks`` as a user calls it, and its stages: complete, documented, with the floors that were set."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from esmeray.benchmarks.__main__ import MODULES, load_stages, main, require_packages
from esmeray.common.errors import ConfigError
from tests.benchmarks.harness.toy_stage import toy_stage

FLOORS = {
    ("conversion", "cpu"): [4.0, 0.6, 0.8],
    ("loading", "cpu"): [300.0, 150.0, 1.0],
    ("loading", "cuda"): [300.0, 150.0, 1.0, 1.0],
    ("embedding", "cpu"): [8.0, 1.3, 8.0, 8.0, 1.5, 8.0, *[1.0] * 4],
    ("embedding", "cuda"): [0.5, 5.0, *[1 / 0.6] * 4],
    ("proteome", "cpu"): [8.0, 1.7, 0.9, 1.0, 1.0],
    ("service", "cpu"): [0.85, 5.0, 1.0, 1.0, 1.0, 1.0],
    ("training", "cpu"): [3.0, 1.0],
    ("training", "cuda"): [1 / 0.6, 0.45],
    ("masked_lm_recipe", "cpu"): [],
    ("time_to_loss", "cpu"): [7.0],
    ("plan", "cpu"): [0.9, 0.9],
    ("runs", "cpu"): [20.0, 0.99],
    ("runs", "cuda"): [20.0, 0.99],
    ("alignment", "cpu"): [1.2, 2.0, 0.9],
    ("function_evaluation", "cpu"): [20.0, 4.0],
    ("function_prediction", "cpu"): [1.0] * 12,
}
"""What each stage has to reach, in the order of its rows. Lowering one is a decision, not a side effect."""


@pytest.mark.parametrize("name", MODULES)
def test_a_stage_is_named_as_its_module_says_what_it_measures_and_has_the_floors_that_were_set(name: str):
    (stage,) = load_stages([name])
    assert stage.name == name
    assert len(sys.modules[f"esmeray.benchmarks.stages.{name}"].__doc__.split()) > 40
    rows = [(c.case, c.ours, c.peer_name) for c in stage.comparisons]
    assert len(rows) == len(set(rows))
    set_floors = {device: floors for (module, device), floors in FLOORS.items() if module == name}
    assert "cpu" in set_floors
    for device, floors in set_floors.items():
        assert [c.floors[device] for c in stage.comparisons if device in c.floors] == floors


def test_a_missing_peer_is_one_line_that_says_how_to_install_it():
    stage = replace(toy_stage("conversion"), packages=("no_such_package",))
    with pytest.raises(ConfigError, match="no_such_package: 'make bench' installs the peers"):
        require_packages([stage])


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
