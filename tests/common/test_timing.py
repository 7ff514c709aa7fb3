from esmeray.common import timing
from esmeray.common.timing import Ratio, median_interval, ratio, round_ratios, warm_up


def test_a_warm_up_ends_when_two_medians_in_a_row_agree_within_two_percent():
    samples = iter([100, 10, 100, 50, 50, 50, 49.5, 10, 90, 1])
    assert warm_up(lambda: next(samples)) and next(samples) == 1


def test_a_warm_up_that_never_settles_ends_and_reports_it():
    for max_s, medians in ((60.0, timing.MAX_MEDIANS), (0.0, 2)):
        doubling = (2.0 ** (number // 3) for number in range(1000))
        assert not warm_up(lambda coming=doubling: next(coming), max_s)
        assert next(doubling) == 2.0**medians


def test_a_ratio_within_each_round_cancels_common_noise():
    assert ratio(round_ratios([10.0, 5.0, 20.0], [5.0, 2.5, 10.0])) == Ratio(2.0, 2.0, 2.0)
    assert round_ratios([50.0], [200.0], "lower") == [4.0]


def test_an_interval_of_few_rounds_spans_all_of_them():
    assert ratio([3.0, 1.0, 2.0]) == Ratio(2.0, 1.0, 3.0)
    assert median_interval([*range(1, 24), 1000.0, -1000.0]) == (7, 17)
    assert median_interval([float(value) for value in range(8)]) == (0, 7)
    assert median_interval([float(value) for value in range(9)]) == (1, 7)
