"""The stage of plans: two workers train together, and alone beside each other for their plan."""

import pytest

from esmeray.benchmarks.harness.stage import Setting
from esmeray.benchmarks.stages.plan import STAGE


@pytest.mark.slow
def test_two_workers_and_their_plan_have_a_rate(tmp_path):
    (case,) = STAGE.cases(Setting(device="cpu", quick=True, folder=tmp_path))
    assert all(contender.run() > 0 for contender in case.contenders)
    assert 0 < case.facts["MFU alone"] < 1 and case.facts["Gbit/s"] > 0
    assert not list(STAGE.cases(Setting(device="cuda", quick=True, folder=tmp_path)))
