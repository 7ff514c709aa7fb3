"""What follows from measurements for configurations that were not measured."""

from dataclasses import replace

import pytest

from training.search_knowledge import Knowledge, together
from training.speed_model import SpeedModel
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


def test_trials_of_one_configuration_give_the_mean_and_the_largest_peak():
    all_three = together([ok(100.0, 7), ok(90.0, 5), ok(80.0, 6)])
    assert (all_three.tokens_per_s, all_three.windows, all_three.peak_memory_bytes) == (90.0, [100.0, 90.0, 80.0], 7)
    assert all_three.reason == "100, 90, 80 tokens/s in 3 trials"


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


def test_fastest_is_what_the_model_says_where_there_is_one():
    slow, fast = SETTINGS, replace(SETTINGS, tokens=2048)
    # Beside each other 80 and 85; in a better minute the first one alone was measured once more.
    trials = [(slow, 80.0, 5.0), (fast, 85.0, 5.0), (slow, 80.0, 5.0), (slow, 130.0, 300.0)]
    by_figures, by_model = Knowledge(0.08), Knowledge(0.08, model=SpeedModel({"tokens": (1024, 2048)}))
    for settings, speed, seconds in trials:
        for knowledge in (by_figures, by_model):
            knowledge.learn(settings, replace(ok(speed), windows=[speed, 0.9 * speed], seconds=seconds))
    assert by_figures.best() == slow
    assert by_model.best() == fast


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
    knowledge = Knowledge(0.08, model=SpeedModel({"tokens": (1024, 2048)}))
    knowledge.learn(SETTINGS, Measurement("pruned", "needs more than what did not fit"))
    assert knowledge.trials == {} and SETTINGS in knowledge.measurements
    assert knowledge.best() is None
