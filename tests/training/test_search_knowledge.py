"""What follows from measurements for configurations that were not measured."""

import math
from dataclasses import replace

import pytest

from training.search_knowledge import Knowledge, of_two
from training.throughput import Measurement, Settings

TOTAL_BYTES = 1 << 30
SETTINGS = Settings(1024, None, 0, 4, "none", False, False, 2, 1)


def ok(speed: float, peak_bytes: int = 1000) -> Measurement:
    return Measurement("ok", "", speed, [speed], peak_memory_bytes=peak_bytes, total_memory_bytes=TOTAL_BYTES)


def test_fewer_workers_have_more_of_a_shared_memory_each():
    two = Settings(8192, None, 0, 4, "none", False, False, 2, 2)
    one = replace(two, workers=1)
    too_large = Measurement("out_of_memory", "memory ran out", peak_memory_bytes=TOTAL_BYTES)
    for shares_memory, expected in ((False, two), (True, None)):
        knowledge = Knowledge(0.08, shares_memory)
        knowledge.learn(two, too_large)
        assert knowledge.known_not_to_fit(one) == expected
        assert knowledge.known_not_to_fit(replace(two, tokens=16384)) == two


def test_effect_of_a_change_is_the_mean_over_the_pairs_that_differ_in_it_alone():
    knowledge = Knowledge(0.08)
    more, larger = replace(SETTINGS, num_workers=1), replace(SETTINGS, tokens=2048)
    for settings, speed in ((SETTINGS, 100.0), (more, 50.0), (larger, 80.0), (replace(larger, num_workers=1), 80.0)):
        knowledge.learn(settings, ok(speed))
    elsewhere = replace(SETTINGS, tokens=4096)
    assert knowledge.effect(elsewhere, replace(elsewhere, num_workers=1), "num_workers") == pytest.approx(
        math.log(0.5) / 2
    )
    assert knowledge.effect(elsewhere, replace(elsewhere, amp_dtype="bf16"), "amp_dtype") == 0.0


def test_effect_says_nothing_of_what_does_not_fit():
    knowledge = Knowledge(0.08)
    knowledge.learn(SETTINGS, ok(100.0))
    knowledge.learn(replace(SETTINGS, num_workers=1), ok(10.0, TOTAL_BYTES))
    assert knowledge.effect(SETTINGS, replace(SETTINGS, num_workers=1), "num_workers") == 0.0


def test_two_measurements_give_the_mean_and_the_larger_peak():
    both = of_two(ok(100.0, 7), ok(90.0, 5))
    assert (both.tokens_per_s, both.windows, both.peak_memory_bytes) == (95.0, [100.0, 90.0], 7)
    assert "90 tokens/s, and 100 before" in both.reason


@pytest.mark.parametrize("status", ["crash", "out_of_memory", "timeout", "nan"])
def test_second_measurement_that_failed_counts_alone(status):
    failed = Measurement(status, "it broke")
    assert of_two(ok(100.0), failed) == failed
