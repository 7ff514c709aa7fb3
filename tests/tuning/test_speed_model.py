"""What the model makes of figures, of a machine that changes its speed and of faults."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tuning.settings import Measurement, Settings
from tuning.speed_model import SpeedModel

VALUES = {
    "tokens": (1024, 2048, 4096, 8192),
    "amp_dtype": ("bf16", "none"),
    "num_workers": (0, 1),
    "gradient_checkpointing": (False, True),
    "stage": (2,),
}
OWN = Settings(1024, None, 0, 4, "none", False, False, 2, 1)
BF16 = replace(OWN, amp_dtype="bf16")


def trial(speed: float, scatter: float = 0.001, seconds: float = 5.0) -> Measurement:
    """Of two windows that are apart by so much of their mean."""
    return Measurement("ok", "", speed, [speed * (1 + scatter / 2), speed * (1 - scatter / 2)], seconds=seconds)


def learned(*trials: tuple[Settings, Measurement]) -> SpeedModel:
    model = SpeedModel(VALUES)
    for settings, measurement in trials:
        model.learn(settings, measurement)
    return model


def test_estimates_are_the_figures_where_windows_agree():
    figures = {OWN: 100.0, BF16: 190.0, replace(OWN, tokens=4096): 130.0, replace(OWN, num_workers=1): 60.0}
    model = learned(*((settings, trial(speed)) for settings, speed in figures.items()))
    assert model.tokens_per_s(list(figures)) == pytest.approx(list(figures.values()), rel=0.01)


def test_what_a_setting_did_elsewhere_counts_for_what_was_not_tried():
    larger = replace(OWN, tokens=4096)
    model = learned((OWN, trial(100.0)), (BF16, trial(200.0)), (larger, trial(110.0)))
    (untried,) = model.tokens_per_s([replace(larger, amp_dtype="bf16")])
    assert untried == pytest.approx(220.0, rel=0.1)


def test_neighbouring_budgets_are_expected_to_be_alike():
    model = learned((OWN, trial(100.0)), (replace(OWN, tokens=8192), trial(200.0)))
    estimates = model.tokens_per_s([replace(OWN, tokens=tokens) for tokens in VALUES["tokens"]])
    assert estimates == sorted(estimates)


def test_a_slow_half_minute_of_the_machine_is_taken_out():
    # What was 100 is 70 now: 75 for another one, right beside it, is more than 100 was.
    rival = replace(OWN, num_workers=1)
    figures = [(OWN, 100.0), (OWN, 102.0), (OWN, 70.0), (rival, 75.0), (OWN, 71.0)]
    model = learned(*((settings, trial(speed, scatter=0.1)) for settings, speed in figures))
    own, faster = model.tokens_per_s([OWN, rival])
    assert faster > own
    quiet = learned((OWN, trial(100.0)), (rival, trial(75.0)))
    assert quiet.tokens_per_s([rival])[0] < 80


def test_recomputing_is_expected_to_cost_a_forward_pass_until_it_was_tried():
    recomputing = replace(OWN, gradient_checkpointing=True)
    model = learned((OWN, trial(100.0)))
    assert model.tokens_per_s([recomputing])[0] == pytest.approx(75.0, rel=0.01)
    model.learn(recomputing, trial(95.0))
    assert model.tokens_per_s([recomputing])[0] == pytest.approx(95.0, rel=0.01)


def test_gain_is_expected_of_what_is_unknown_and_none_of_what_is_known_to_be_slower():
    model = learned((OWN, trial(100.0)), (BF16, trial(200.0)))
    known, unknown = model.gains(BF16, [OWN, replace(BF16, num_workers=1)])
    assert known < 1e-6 < 0.05 < unknown


def test_figures_that_contradict_each_other_leave_more_to_be_gained_by_measuring_again():
    rival = replace(OWN, num_workers=1)
    quiet = learned((OWN, trial(105.0)), (rival, trial(100.0)), (OWN, trial(105.0)))
    (of_quiet,) = quiet.gains(OWN, [rival])
    contradicting = learned((OWN, trial(90.0)), (rival, trial(100.0)), (OWN, trial(120.0)))
    assert contradicting.gains(OWN, [rival])[0] > 0.001 > of_quiet


def test_fault_makes_less_of_its_neighbours_and_a_figure_beside_it_makes_up_for_that():
    nan = (BF16, Measurement("nan", "loss was not finite"))
    beside = replace(BF16, tokens=2048)
    before = learned((OWN, trial(100.0)))
    after = learned((OWN, trial(100.0)), nan)
    assert after.tokens_per_s([beside])[0] < 0.7 * before.tokens_per_s([beside])[0]
    after.learn(replace(BF16, tokens=4096), trial(200.0))
    assert after.tokens_per_s([beside])[0] > 120.0


def test_out_of_memory_says_nothing_of_speed():
    model = learned((OWN, trial(100.0)), (BF16, Measurement("out_of_memory", "memory ran out")))
    assert model.tokens_per_s([BF16]) == learned((OWN, trial(100.0))).tokens_per_s([BF16])


def test_nothing_is_estimated_before_anything_was_measured():
    model = learned((BF16, Measurement("crash", "it died")))
    with pytest.raises(ValueError, match="nothing was measured"):
        model.tokens_per_s([OWN])


def test_space_of_one_configuration_has_an_estimate():
    model = SpeedModel({"tokens": (1024,)})
    model.learn(OWN, trial(100.0))
    assert model.tokens_per_s([OWN]) == pytest.approx([100.0])
    assert all(math.isfinite(gain) for gain in model.gains(OWN, [OWN]))
