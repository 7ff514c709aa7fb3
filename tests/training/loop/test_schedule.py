import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_config.schema import TrainingSection
from training.loop.schedule import EarlyStopping, learning_rate


def test_warms_up_linearly_then_falls_to_the_floor():
    training = TrainingSection(learning_rate=1.0, warmup_steps=10, min_learning_rate_share=0.1)
    assert learning_rate(0, 110, training) == pytest.approx(0.1)
    assert learning_rate(9, 110, training) == pytest.approx(1.0)
    assert learning_rate(60, 110, training) == pytest.approx(0.55)
    assert learning_rate(110, 110, training) == pytest.approx(0.1)


@given(st.integers(0, 500), st.integers(1, 400), st.integers(0, 100))
def test_stays_between_zero_and_the_peak(step, total, warmup):
    training = TrainingSection(learning_rate=0.5, warmup_steps=warmup)
    assert 0 < learning_rate(step, total, training) <= 0.5


def test_without_warmup_steps_a_tenth_of_the_run_warms_up():
    named, unnamed = TrainingSection(warmup_steps=20), TrainingSection()
    assert [learning_rate(step, 200, unnamed) for step in range(200)] == [
        learning_rate(step, 200, named) for step in range(200)
    ]


def test_it_is_over_after_as_many_evaluations_without_a_better_one():
    stopping = EarlyStopping(patience=2)
    over = []
    for cost in (3.0, 2.0, 2.5, 1.0, 1.0, 1.5):
        stopping.note(cost)
        over.append(stopping.is_over)
    assert over == [False, False, False, False, False, True]


def test_an_equal_cost_is_not_better():
    stopping = EarlyStopping(patience=None, costs=[1.0])
    stopping.note(1.0)
    assert not stopping.is_best
    stopping.note(0.5)
    assert stopping.is_best
    assert not stopping.is_over, "without patience"


def test_a_resumed_run_stops_where_it_would_have():
    costs = [3.0, 2.0, 2.5, 2.4, 2.3, 1.0]
    whole, resumed = EarlyStopping(3, costs), EarlyStopping(3, costs[:2])
    for cost in costs[2:]:
        resumed.note(cost)
    assert (resumed.is_over, resumed.is_best) == (whole.is_over, whole.is_best)


def test_an_infinite_cost_is_never_best():
    stopping = EarlyStopping(patience=1, costs=[math.inf])
    assert stopping.is_over
    assert not stopping.is_best
