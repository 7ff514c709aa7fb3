"""A case is checked, warmed up and measured; no claim here depends on time."""

import pytest

from benchmarks.harness.protocol import measure_case, sampler
from benchmarks.harness.stage import Case, Contender
from common import timing


def test_rates_are_warmed_up_by_the_short_work_where_there_is_some():
    calls: list[str] = []
    contender = Contender("a", lambda: calls.append("long") or 1.0, short=lambda: calls.append("short") or 1.0)
    measured = measure_case(Case("c", "u", (contender,), rounds=2))
    assert set(calls[:-2]) == {"short"} and calls[-2:] == ["long", "long"]
    assert "a" in measured.settled


def test_a_rate_is_work_divided_by_the_time_of_the_work_alone(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def passes(seconds: float) -> float:
        clock[0] += seconds
        return 10.0

    contender = Contender("a", lambda: passes(2.0), before=lambda: passes(100.0))
    assert sampler(contender, contender.run)() == 5.0
