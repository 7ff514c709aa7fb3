"""The features stage trains the same head from kept and from computed features."""

from __future__ import annotations

import pytest

from benchmarks.harness.stage import Setting, WrongWorkError
from benchmarks.stages.features import STAGE, Heads


def test_heads_of_other_losses_are_no_comparison(tmp_path):
    heads = Heads(Setting("cpu", True, tmp_path), "", 1, 2, {})
    heads._compare([3.0, 2.0])
    heads._compare([3.0, 2.0 + 1e-5])
    with pytest.raises(WrongWorkError):
        heads._compare([3.0, 2.1])


@pytest.mark.slow
def test_both_ways_train_the_steps_that_are_measured(tmp_path):
    (case,) = STAGE.cases(Setting(device="cpu", quick=True, folder=tmp_path))
    kept, computed = (contender.run() for contender in case.contenders)
    assert kept > 0
    assert computed > 0
    assert "seconds of the run that computed the features" in case.facts
