"""Benchmark harness: measure contenders in rounds, compare them with a 95 % interval.

Each round measures every contender once, in rotating order: disturbances affect all alike, and a ratio can be taken
within each round.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import comb
from statistics import median
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")

REPEATS_PER_MEDIAN = 3


class Ratio(NamedTuple):
    """Median of the ratios of all rounds, and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} times ({self.low:.2f} to {self.high:.2f})"


def measure(
    contenders: Mapping[str, Callable[[], T]], rounds: int, show: Callable[[str], None] = lambda _: None
) -> dict[str, list[T]]:
    """Samples per contender, one per round, in rotating order; ``show`` receives the current contender and round."""
    names = list(contenders)
    samples: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            show(f"{name}: round {number + 1}")
            samples[name].append(contenders[name]())
    return samples


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a piece of work and the seconds that it took, the GPU's work included."""
    wait_for_device()  # otherwise work launched earlier would count
    start_s = time.perf_counter()
    result = work()
    wait_for_device()
    return result, time.perf_counter() - start_s


def median_seconds(work: Callable[[], object]) -> float:
    """Median of five times, the GPU's work included, after some to warm up."""
    for _ in range(REPEATS_PER_MEDIAN):  # kernels are compiled and caches filled
        work()
    return median(timed(work)[1] for _ in range(5))


def wait_for_device() -> None:
    """Wait for the GPU if torch is loaded and has used one."""
    torch = sys.modules.get("torch")  # not imported here: it takes seconds, and benchmarks of reading don't need it
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def round_ratios(
    ours: Sequence[float], other: Sequence[float], better: Literal["higher", "lower"] = "higher"
) -> list[float]:
    """Ratio per round that measured both; above 1 if ours is better."""
    if better == "lower":
        ours, other = other, ours
    # Not strict: one of them may have been measured in fewer rounds.
    return [a / b for a, b in zip(ours, other, strict=False)]


def ratio(ratios: Sequence[float]) -> Ratio:
    return Ratio(median(ratios), *median_interval(ratios))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Interval that holds the median with a probability of 95 %, whatever the distribution.

    Between the k-th smallest and the k-th largest, for the largest k such that fewer than k of n fall below the median
    with a chance of at most 2.5 % (David and Nagaraja 2003, Order Statistics, section 7.1). Of fewer than nine values
    it is the smallest to the largest, and of fewer than six no interval is as certain.
    """
    ordered, count = sorted(values), len(values)
    chances = accumulate(comb(count, below) * 0.5**count for below in range(count))
    rank = max(0, sum(chance <= 0.025 for chance in chances) - 1)
    return ordered[rank], ordered[-1 - rank]
