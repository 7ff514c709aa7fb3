"""Ratios, their intervals and verdicts."""

from __future__ import annotations

import pytest

from benchmarks.ratios import Ratio, ratio_of, round_ratios, spread, verdict


def test_a_ratio_is_taken_within_each_round_so_that_noise_common_to_a_round_cancels():
    ours, peer = [10.0, 5.0, 20.0], [5.0, 2.5, 10.0]
    assert ratio_of(round_ratios(ours, peer, "higher")) == Ratio(2.0, 2.0, 2.0)


def test_the_ratio_is_the_median_of_the_rounds_and_its_interval_their_extremes():
    assert ratio_of([3.0, 1.0, 2.0]) == Ratio(2.0, 1.0, 3.0)


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
