from esmeray.common.timing import Ratio, median_interval, ratio, round_ratios


def test_a_ratio_within_each_round_cancels_common_noise():
    assert ratio(round_ratios([10.0, 5.0, 20.0], [5.0, 2.5, 10.0])) == Ratio(2.0, 2.0, 2.0)
    assert round_ratios([50.0], [200.0], "lower") == [4.0]


def test_an_interval_of_few_rounds_spans_all_of_them():
    assert ratio([3.0, 1.0, 2.0]) == Ratio(2.0, 1.0, 3.0)
    assert median_interval([*range(1, 24), 1000.0, -1000.0]) == (7, 17)
    assert median_interval([float(value) for value in range(8)]) == (0, 7)
    assert median_interval([float(value) for value in range(9)]) == (1, 7)
