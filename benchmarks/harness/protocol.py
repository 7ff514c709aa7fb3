"""How a case is measured: warmed up until it is steady, then in turns.

In: a case. Out: the samples of every contender and the ratios. Each contender is warmed up by short repeats until the
medians of two successive threes agree within 2 %, within bounds; whether they did is part of the result. Then all
contenders are measured once a round, in an order that rotates, so that what disturbs the machine hits them alike.
On CUDA, the device is synchronised before and after each timed piece of work.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from benchmarks.harness.stage import Case, Contender, Device, Facts

AGREEMENT = 0.02
"""Two successive medians that differ by no more than this are steady."""

REPEATS_PER_MEDIAN = 3
MOST_MEDIANS = 6
MOST_WARM_UP_S = 30.0
"""Bounds of the warm-up of one contender, whichever is met first. Two medians are always taken."""


@dataclass(frozen=True)
class Effort:
    """How thoroughly is measured."""

    warm_up: bool = True
    most_rounds: int | None = None


QUICK = Effort(warm_up=False, most_rounds=1)
FULL = Effort()


@dataclass(frozen=True)
class WarmUp:
    """What the warm-up of one contender came to.

    Attributes:
        medians: of three repeats each, in the case's unit.
        settled: whether the last two agree.
    """

    medians: list[float] = field(default_factory=list)
    settled: bool = False


@dataclass(frozen=True)
class Measured:
    """The outcome of a case: samples by contender, in order of the rounds, in the case's unit."""

    samples: dict[str, list[float]]
    warm_ups: dict[str, WarmUp]
    facts: Facts


Show = Callable[[str], None]


def measure_case(case: Case, device: Device, effort: Effort = FULL, show: Show = lambda _: None) -> Measured:
    """Check, warm up and measure all contenders of a case.

    Args:
        case: what to measure.
        device: that the work runs on.
        effort: how thoroughly.
        show: told what is being done.

    Raises:
        WrongWorkError: the contenders do not compute the same.
    """
    facts: Facts = {}
    if case.check is not None:
        show("checking that all compute the same")
        facts |= case.check()
    warm_ups = {}
    for contender in case.contenders:
        if contender.kind == "rate" and effort.warm_up:
            show(f"{contender.name}: warming up")
            warm_ups[contender.name] = warm_up(contender, device)
    rounds = case.rounds if effort.most_rounds is None else min(case.rounds, effort.most_rounds)
    samples: dict[str, list[float]] = {contender.name: [] for contender in case.contenders}
    for number in range(rounds):
        turn = number % len(case.contenders)
        for contender in case.contenders[turn:] + case.contenders[:turn]:
            show(f"{contender.name}: round {number + 1} of {rounds}")
            samples[contender.name].append(sample(contender, contender.run, device))
    return Measured(samples, warm_ups, {**facts, **case.facts})


def warm_up(contender: Contender, device: Device, most_s: float = MOST_WARM_UP_S) -> WarmUp:
    """Repeat short work until it is steady, or a bound is met."""
    run = contender.short or contender.run
    medians: list[float] = []
    start_s = time.perf_counter()
    while len(medians) < MOST_MEDIANS:
        repeats = [sample(contender, run, device) for _ in range(REPEATS_PER_MEDIAN)]
        medians.append(median(repeats))
        if len(medians) >= 2 and agree(medians[-2], medians[-1]):
            return WarmUp(medians, settled=True)
        if len(medians) >= 2 and time.perf_counter() - start_s > most_s:
            break
    return WarmUp(medians, settled=False)


def agree(first: float, second: float) -> bool:
    """Whether two medians differ by at most :data:`AGREEMENT` of the larger."""
    return abs(first - second) <= AGREEMENT * max(abs(first), abs(second))


def sample(contender: Contender, run: Callable[[], float], device: Device) -> float:
    """One measurement: the work done per second, or the value that was returned."""
    if contender.before is not None:
        contender.before()
    gc.collect()
    synchronize = _synchronizer(device)
    synchronize()
    start_s = time.perf_counter()
    result = run()
    synchronize()
    elapsed_s = time.perf_counter() - start_s
    return result / elapsed_s if contender.kind == "rate" else result


def _synchronizer(device: Device) -> Callable[[], None]:
    if device == "cpu":
        return lambda: None
    import torch

    return torch.cuda.synchronize
