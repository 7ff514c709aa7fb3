import pytest
import torch

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


class FakeEvent:
    """A CUDA event on a simulated device, which reaches events only when the test lets it."""

    device_s = 0.0
    passed_s = -1.0
    synchronized = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = FakeEvent.device_s

    def query(self):
        return self.at <= FakeEvent.passed_s

    def elapsed_time(self, end):
        assert end.query(), "would wait for the device"
        return 1000 * (end.at - self.at)


@pytest.fixture
def cuda(monkeypatch) -> type[FakeEvent]:
    FakeEvent.device_s, FakeEvent.passed_s = 0.0, -1.0
    stream = ["compute"]
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream[0])
    FakeEvent.stream = stream
    return FakeEvent


def test_gpu_times_are_read_without_waiting_for_the_device(cuda):
    clock = StepClock(torch.device("cuda", 0))
    with clock.phase("forward"):
        cuda.device_s = 2.0
    with clock.phase("backward"):
        cuda.device_s = 7.0
    clock.stepped(tokens=1)
    cuda.passed_s = 3.0  # in the middle of the backward pass
    figures = clock.read()
    assert (figures["forward_s"], figures["backward_s"]) == pytest.approx((2.0, 0.0))
    cuda.passed_s = 8.0
    clock.stepped(tokens=1)
    assert clock.read()["backward_s"] == pytest.approx(5.0)
