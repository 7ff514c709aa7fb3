import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_config.schema import TrainingSection
from training.loop.schedule import learning_rate


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
