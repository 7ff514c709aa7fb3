import pytest

from train_config.schema import TrainingSection
from training.loop.schedule import EarlyStopping, learning_rate


def test_warms_up_linearly_then_falls_to_the_floor():
    training = TrainingSection(learning_rate=1.0, warmup_steps=10, min_learning_rate_share=0.1)
    assert learning_rate(0, 110, training) == pytest.approx(0.1)
    assert learning_rate(9, 110, training) == pytest.approx(1.0)
    assert learning_rate(60, 110, training) == pytest.approx(0.55)
    assert learning_rate(110, 110, training) == pytest.approx(0.1)
    assert learning_rate(9, 200, TrainingSection(learning_rate=1.0)) == pytest.approx(0.5), "a tenth of the run"


def test_it_is_over_after_as_many_evaluations_without_a_better_one():
    costs = [3.0, 2.0, 2.5, 1.0, 1.0, 1.5]
    resumed = [EarlyStopping(2, costs[:number]) for number in range(1, 7)]
    assert [stopping.is_over for stopping in resumed] == [False, False, False, False, False, True]
    assert [stopping.is_best for stopping in resumed] == [True, True, False, True, False, False]
