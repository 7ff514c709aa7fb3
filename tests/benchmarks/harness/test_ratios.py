"""Ratios, their intervals and verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.harness.ratios import Ratio, ratio_of, round_ratios, spread, verdict


def test_a_ratio_is_taken_within_each_round_so_that_noise_common_to_a_round_cancels():
    ours, peer = [10.0, 5.0, 20.0], [5.0, 2.5, 10.0]
    assert ratio_of(round_ratios(ours, peer, "higher")) == Ratio(2.0, 2.0, 2.0)


def test_the_ratio_is_the_median_of_the_rounds_and_its_interval_their_extremes():
    assert ratio_of([3.0, 1.0, 2.0]) == Ratio(2.0, 1.0, 3.0)


def test_the_mean_of_many_rounds_tells_what_the_median_of_few_does_not():
    noise = np.random.default_rng(1).normal(0, 0.02, 100)
    ratio = ratio_of(np.exp(noise - noise.mean() + np.log(0.97)).tolist(), "mean")
    assert ratio.value == pytest.approx(0.97)
    assert 0.964 < ratio.low < 0.968
    assert 0.972 < ratio.high < 0.976


def test_what_costs_much_in_a_few_rounds_counts_in_the_mean():
    ratios = [1.0] * 18 + [0.5] * 2
    assert ratio_of(ratios).value == 1.0
    assert ratio_of(ratios, "mean").value == pytest.approx(0.5**0.1)


def test_a_drift_cancels_in_the_mean_as_rounds_alternate_their_order():
    assert ratio_of([1.05, 1 / 1.05] * 10, "mean") == pytest.approx((1.0, 1.0, 1.0))


def test_the_mean_of_one_round_is_that_round():
    assert ratio_of([0.9], "mean") == pytest.approx((0.9, 0.9, 0.9))


def test_where_less_is_better_the_ratio_is_larger_for_the_smaller():
    assert round_ratios([50.0], [200.0], "lower") == [4.0]


def test_contenders_that_were_not_measured_equally_often_have_no_ratio():
    with pytest.raises(ValueError):
        round_ratios([1.0, 2.0], [1.0], "higher")


def test_spread_is_the_median_between_the_quartiles():
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("ratio", "floor", "expected"),
    [
        (Ratio(2.0, 1.9, 2.1), 1.5, "reached"),
        (Ratio(2.0, 1.4, 2.1), 1.5, "reached, within noise"),
        (Ratio(1.4, 1.3, 1.6), 1.5, "missed, within noise"),
        (Ratio(1.4, 1.3, 1.45), 1.5, "missed"),
        (Ratio(1.4, 1.3, 1.45), None, "no floor"),
    ],
)
def test_a_verdict_says_whether_every_round_agrees(ratio: Ratio, floor: float | None, expected: str):
    assert verdict(ratio, floor) == expected
