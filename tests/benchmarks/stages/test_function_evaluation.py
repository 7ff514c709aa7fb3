"""The stage of evaluating functions holds both programs to the same curves."""

import importlib.util

import pytest

from esmeray.benchmarks.harness.stage import Setting, WrongWorkError
from esmeray.benchmarks.stages.function_evaluation import OURS, PEER, STAGE, _difference


def test_both_programs_run_and_agree(tmp_path):
    if importlib.util.find_spec("cafaeval") is None:
        pytest.skip("cafaeval is not installed ('make bench' installs it)")
    time, memory = STAGE.cases(Setting(device="cpu", quick=True, folder=tmp_path))
    assert [contender.name for contender in time.contenders] == [OURS, PEER]
    assert all(contender.run() > 0 for case in (time, memory) for contender in case.contenders)
    assert time.facts["largest difference of a curve"] < 6e-4


def test_other_curves_are_no_comparison(tmp_path):
    for name, value in (("ours/curves.tsv", 0.1), ("peer/evaluation_all.tsv", 0.2)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(f"ns\tf\nx\t{value}\n")
    with pytest.raises(WrongWorkError, match=r"curves differ by 0\.1"):
        _difference(tmp_path)
