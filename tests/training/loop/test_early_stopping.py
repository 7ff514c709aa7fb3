"""Training ends when no evaluation was better for as long as the patience says."""

from __future__ import annotations

import math

import pytest

from training.loop.early_stopping import EarlyStopping


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


def test_without_patience_it_is_never_over():
    stopping = EarlyStopping(patience=None, costs=range(100))
    assert not stopping.is_over


@pytest.mark.parametrize("done", range(6))
def test_a_run_that_goes_on_stops_where_it_would_have(done):
    costs = [3.0, 2.0, 2.5, 2.4, 2.3, 1.0]
    whole, resumed = EarlyStopping(3, costs), EarlyStopping(3, costs[:done])
    for cost in costs[done:]:
        resumed.note(cost)
    assert (resumed.is_over, resumed.is_best) == (whole.is_over, whole.is_best)


def test_an_infinite_cost_is_never_best():
    stopping = EarlyStopping(patience=1, costs=[math.inf])
    assert stopping.is_over
    assert not stopping.is_best
