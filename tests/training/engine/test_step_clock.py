import pytest

from esmeray.training.engine.step_clock import PHASES, StepClock


@pytest.fixture
def now(monkeypatch) -> list[float]:
    time = [100.0]
    monkeypatch.setattr("esmeray.training.engine.step_clock.time.perf_counter", lambda: time[0])
    return time


def test_phases_and_data_wait_sum_to_the_step_time(now):
    clock = StepClock()
    now[0] += 1.0
    clock.loaded()
    for phase, seconds in (("communication", 0.5), ("forward", 2.0), ("optimizer", 0.25)):
        with clock.phase(phase):
            now[0] += seconds
    with clock.phase("backward"):
        now[0] += 3.0
        with clock.collective():
            now[0] += 1.0
    clock.stepped(tokens=300, own_tokens=150, budget_tokens=200)
    figures = clock.read()
    parts = [figures[f"{phase}_s"] for phase in PHASES if phase != "checkpoint"]
    assert sum(parts) + figures["data_wait_s"] == pytest.approx(figures["step_s"]) == pytest.approx(7.75)
    assert (figures["backward_s"], figures["communication_s"]) == pytest.approx((3.0, 1.5))
    assert figures["tokens_per_s"] == pytest.approx(300 / 7.75)
    assert figures["padding_share"] == pytest.approx(0.25)
