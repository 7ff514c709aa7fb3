"""The features stage trains the same head from kept and from computed features."""

from __future__ import annotations

import pytest

from benchmarks.harness.stage import Setting
from benchmarks.stages.features import STAGE


@pytest.mark.slow
def test_both_ways_train_the_steps_that_are_measured(tmp_path):
    (case,) = STAGE.cases(Setting(device="cpu", quick=True, folder=tmp_path))
    kept, computed = (contender.run() for contender in case.contenders)
    assert kept > 0
    assert computed > 0
    assert "seconds of the run that computed the features" in case.facts
