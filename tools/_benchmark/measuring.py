"""Variants of one piece of work, measured in turns until their time is up.

In: variants, each of which does a piece of the work when called, and a clock. Out: their samples. Each is done
once before it counts; then all take turns, once a round and in an order that rotates, so that what disturbs the machine
hits them alike and variants can be compared within each round. On CUDA the device is waited for around timed work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeAlias

import torch

LEAST_ROUNDS = 3
"""Fewer than these say nothing of the spread, so nothing is advised from them."""

MOST_ROUNDS = 25

Settings: TypeAlias = dict[str, int | str]
Show: TypeAlias = Callable[[str], None]


class Done(NamedTuple):
    """What a piece of work came to.

    Attributes:
        amounts: work done, by the unit of its rate: ``{"records/s": 1000}`` is divided by the seconds that it took.
        values: what the piece measured itself, by unit, as it is.
    """

    amounts: Mapping[str, float]
    values: Mapping[str, float] = {}


@dataclass(frozen=True)
class Variant:
    """One way to do the work of a stage.

    Attributes:
        name: as the table shows it.
        work: does a piece of it.
        settings: what is varied, by name.
    """

    name: str
    work: Callable[[], Done]
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """What was measured of a variant: samples by unit, one for each round."""

    name: str
    settings: Settings
    samples: dict[str, list[float]]

    def median(self, unit: str) -> float:
        """The middle of the samples."""
        return median(self.samples[unit])

    @property
    def rounds(self) -> int:
        """How often it was measured."""
        return max((len(values) for values in self.samples.values()), default=0)


@dataclass(frozen=True)
class StageResult:
    """A stage that was measured.

    Attributes:
        name: in JSON.
        title: above its table.
        rows: variants that were measured at least once.
        notes: what a reader has to know, such as variants that were left out.
    """

    name: str
    title: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


class Clock:
    """How much of the time there is has passed.

    Args:
        seconds: for everything, from now on.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start_s = time.perf_counter()

    @property
    def passed_s(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._start_s

    def left_s(self, share: float = 1.0) -> float:
        """Until this share of the whole has passed; 0 where it has."""
        return max(0.0, share * self.seconds - self.passed_s)


def measure(
    variants: Sequence[Variant],
    clock: Clock,
    until_share: float,
    device: torch.device,
    show: Show = lambda _: None,
    *,
    warm_up: bool = True,
    most_rounds: int = MOST_ROUNDS,
) -> tuple[list[Row], list[str]]:
    """Measure until this share of the clock has passed, at least :data:`LEAST_ROUNDS` while any of it is left.

    Returns:
        Rows of the variants that were measured at least once, and notes on those that were not.
    """
    running, notes = list(variants), []
    samples: dict[str, dict[str, list[float]]] = {variant.name: {} for variant in variants}
    for number in range(-1 if warm_up else 0, most_rounds):
        if number >= LEAST_ROUNDS and not clock.left_s(until_share):
            break
        turn = number % max(1, len(running))
        for variant in running[turn:] + running[:turn]:
            if number > 0 and not clock.left_s():
                break
            show(f"{variant.name}: {'warming up' if number < 0 else f'round {number + 1}'}")
            try:
                values = _sample(variant, device)
            except torch.OutOfMemoryError:
                running.remove(variant)
                notes.append(f"{variant.name}: out of the device's memory")
                continue
            if number >= 0:
                for unit, value in values.items():
                    samples[variant.name].setdefault(unit, []).append(value)
    rows = [Row(variant.name, variant.settings, samples[variant.name]) for variant in running]
    few = [row for row in rows if row.rounds < min(LEAST_ROUNDS, most_rounds)]
    if few:
        notes.append(f"time was up after {min(row.rounds for row in few)} rounds: --seconds gives more")
    return [row for row in rows if row.rounds], notes


def _sample(variant: Variant, device: torch.device) -> dict[str, float]:
    synchronize(device)
    start_s = time.perf_counter()
    done = variant.work()
    synchronize(device)
    elapsed_s = time.perf_counter() - start_s
    return {**{unit: amount / elapsed_s for unit, amount in done.amounts.items()}, **done.values}


def synchronize(device: torch.device) -> None:
    """Wait for what the device still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
