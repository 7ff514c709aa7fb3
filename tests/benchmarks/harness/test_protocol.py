"""Warming up, taking turns, and refusing wrong work. Time is replaced by values, so nothing here depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from benchmarks.harness import protocol
from benchmarks.harness.protocol import Effort, measure_case, warm_up
from benchmarks.harness.stage import Case, Contender, WrongWorkError


def values(numbers: Iterator[float] | list[float]) -> Contender:
    """A contender that gives one number after the other."""
    coming = iter(numbers)
    return Contender("a", lambda: next(coming), kind="value")


def test_warm_up_ends_when_two_medians_in_a_row_agree_within_two_percent():
    settled = warm_up(values([100, 10, 100, 50, 50, 50, 49.5, 10, 90, 1]), "cpu")
    assert settled.settled
    assert settled.medians == [100, 50, 49.5]


def test_warm_up_ends_without_agreement_after_so_many_medians_and_says_so():
    doubling = (2.0 ** (number // 3) for number in range(1000))
    ended = warm_up(values(doubling), "cpu")
    assert not ended.settled
    assert len(ended.medians) == protocol.MOST_MEDIANS


def test_warm_up_ends_when_its_time_is_over_but_not_before_two_medians():
    doubling = (2.0 ** (number // 3) for number in range(1000))
    assert len(warm_up(values(doubling), "cpu", most_s=0.0).medians) == 2


def test_warm_up_takes_the_short_work_where_there_is_some():
    calls = []
    contender = Contender("a", lambda: calls.append("long") or 1.0, short=lambda: calls.append("short") or 1.0)
    warm_up(contender, "cpu", most_s=0.0)
    assert set(calls) == {"short"}


def test_contenders_take_turns_in_an_order_that_rotates():
    calls: list[str] = []
    measure_case(Case("c", "u", tuple(noted(name, calls) for name in "abc"), rounds=3), "cpu", Effort(warm_up=False))
    assert "".join(calls) == "abc" + "bca" + "cab"


def test_each_contender_has_one_sample_a_round():
    calls: list[str] = []
    case = Case("c", "u", (noted("a", calls), noted("b", calls)), rounds=4)
    measured = measure_case(case, "cpu", Effort(warm_up=False))
    assert {name: len(samples) for name, samples in measured.samples.items()} == {"a": 4, "b": 4}


def test_a_rate_is_work_divided_by_the_time_of_the_work_alone(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: clock[0])

    def run() -> float:
        clock[0] += 2.0
        return 10.0

    def before() -> None:
        clock[0] += 100.0

    assert protocol.sample(Contender("a", run, before=before), run, "cpu") == 5.0


def test_nothing_is_measured_where_contenders_compute_different_things():
    calls: list[str] = []

    def check() -> dict:
        raise WrongWorkError("they differ")

    with pytest.raises(WrongWorkError):
        measure_case(Case("c", "u", (noted("a", calls),), check=check), "cpu")
    assert not calls


def test_facts_of_the_check_and_of_the_case_are_kept_even_if_found_while_measuring():
    facts: dict = {"records": 3}

    def run() -> float:
        facts["found"] = True
        return 1.0

    case = Case("c", "u", (Contender("a", run, kind="value"),), check=lambda: {"equal": 2}, facts=facts)
    assert measure_case(case, "cpu").facts == {"equal": 2, "records": 3, "found": True}


def noted(name: str, calls: list[str]) -> Contender:
    """A contender that writes down when it runs."""
    run: Callable[[], float] = lambda: calls.append(name) or 1.0  # noqa: E731
    return Contender(name, run, kind="value")
