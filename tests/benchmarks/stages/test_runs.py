"""Whole runs of the stage: both ways train the steps that are measured, and other losses are no comparison."""

import pytest

from esmeray.benchmarks.harness.stage import Setting, WrongWorkError
from esmeray.benchmarks.stages.runs import HEAD, STAGE, TrainingRuns


@pytest.mark.slow
def test_a_head_is_trained_from_cached_and_from_computed_features(tmp_path):
    case = next(iter(STAGE.cases(Setting(device="cpu", quick=True, folder=tmp_path))))  # type: ignore[arg-type]
    assert all(contender.run() > 0 for contender in case.contenders)
    assert "seconds of the run that computed the features" in case.facts


def test_runs_of_other_losses_are_no_comparison(tmp_path):
    runs = TrainingRuns(Setting(device="cpu", quick=True, folder=tmp_path), HEAD)  # 1e-4 is allowed
    runs.compare([3.0, 2.0])
    runs.compare([3.0, 2.0 + 1e-5])
    with pytest.raises(WrongWorkError):
        runs.compare([3.0, 2.1])
