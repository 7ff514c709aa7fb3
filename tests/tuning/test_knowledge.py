"""What follows from measurements for configurations that were not measured."""

from dataclasses import replace

import pytest

from tuning.knowledge import Knowledge, together
from tuning.settings import Measurement, Settings

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


def test_trials_of_one_configuration_give_the_mean_and_the_largest_peak():
    all_three = together([ok(100.0, 7), ok(90.0, 5), ok(80.0, 6)])
    assert (all_three.tokens_per_s, all_three.windows, all_three.peak_memory_bytes) == (90.0, [100.0, 90.0, 80.0], 7)
    assert all_three.reason == "100, 90, 80 tokens/s in 3 trials"


def test_the_fastest_has_the_highest_mean_of_its_trials():
    knowledge, lucky, fast = Knowledge(0.08), SETTINGS, replace(SETTINGS, tokens=2048)
    for settings, speed in ((lucky, 130.0), (fast, 110.0), (lucky, 80.0)):
        knowledge.learn(settings, ok(speed))
    assert knowledge.best() == fast
    assert knowledge.speed(lucky) == 105.0


def test_trial_that_was_stopped_early_counts_beside_one_that_was_not():
    stopped = replace(ok(80.0), status="pruned", seconds=3.0)
    for trials in ([stopped, ok(100.0)], [ok(100.0), stopped]):
        both = together(trials)
        assert (both.status, both.tokens_per_s, both.seconds) == ("ok", 90.0, 3.0)
    assert together([stopped, stopped]).status == "pruned"


@pytest.mark.parametrize("status", ["crash", "out_of_memory", "timeout", "nan"])
def test_last_trial_that_failed_counts_alone(status):
    failed = Measurement(status, "it broke")
    assert together([ok(100.0), failed]) == failed


def test_chance_to_fit_falls_with_each_that_did_not_and_rises_with_each_larger_one_that_did():
    knowledge = Knowledge(0.08)
    assert knowledge.chance_to_fit(SETTINGS) == 1.0
    too_large = Measurement("out_of_memory", "memory ran out", peak_memory_bytes=TOTAL_BYTES)
    knowledge.learn(replace(SETTINGS, tokens=4096), too_large)
    rooms = {
        tokens: replace(SETTINGS, tokens=tokens, gradient_checkpointing=True, amp_dtype="bf16")
        for tokens in (2048, 4096, 8192)
    }
    assert [knowledge.chance_to_fit(settings) for settings in rooms.values()] == [1.0, 1 / 2, 1 / 2]
    knowledge.learn(replace(SETTINGS, tokens=4096, amp_dtype="bf16"), too_large)
    assert [knowledge.chance_to_fit(settings) for settings in rooms.values()] == [1.0, 1 / 3, 1 / 3]
    knowledge.learn(replace(rooms[4096], num_workers=1), ok(100.0))
    assert [knowledge.chance_to_fit(settings) for settings in rooms.values()] == [1.0, 2 / 4, 1 / 3]
    knowledge.learn(rooms[4096], ok(100.0))
    assert knowledge.chance_to_fit(rooms[4096]) == 1.0


def test_what_was_concluded_is_no_trial():
    knowledge = Knowledge(0.08)
    knowledge.learn(SETTINGS, Measurement("pruned", "needs more than what did not fit"))
    assert knowledge.trials == {} and SETTINGS in knowledge.measurements
    assert knowledge.best() is None
