"""Measurement of a case: checked, warmed up until it is steady, then in turns (:mod:`common.timing`)."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.harness.stage import Case, Contender, Facts
from common import timing


@dataclass(frozen=True)
class Measured:
    """Samples by contender in order of the rounds, and whether the warm-ups of those that had one became steady."""

    samples: dict[str, list[float]]
    settled: dict[str, bool]
    facts: Facts


def measure_case(case: Case, quick: bool = False, show: Callable[[str], None] = lambda _: None) -> Measured:
    """Check, warm up and measure all contenders of a case; if quick, in one round without a warm-up.

    Raises WrongWorkError where the contenders do not compute the same.
    """
    facts: Facts = {}
    if case.check is not None:
        show("checking that all compute the same")
        facts |= case.check()
    settled = {}
    for contender in case.contenders:
        if contender.kind == "rate" and not quick:
            show(f"{contender.name}: warming up")
            settled[contender.name] = timing.warm_up(sampler(contender, contender.short or contender.run))
    samplers = {contender.name: sampler(contender, contender.run) for contender in case.contenders}
    samples = timing.measure(samplers, 1 if quick else case.rounds, show)
    return Measured(samples, settled, {**facts, **case.facts})


def sampler(contender: Contender, run: Callable[[], float]) -> Callable[[], float]:
    """Return a callable that takes one sample: the work done per second, or the value that ``run`` returns."""

    def sample() -> float:
        if contender.before is not None:
            contender.before()
        gc.collect()
        result, elapsed_s = timing.timed(run)
        return result / elapsed_s if contender.kind == "rate" else result

    return sample


@contextmanager
def single_thread() -> Iterator[None]:
    """Let torch compute on one core within the block, for rates per core."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
