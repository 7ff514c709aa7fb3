"""How long DeepSpeed's collectives hold up a step.

DeepSpeed 0.19.8 calls every collective on one object, ``deepspeed.comm.comm.cdb``. Its own timing
(``comms_logger``) synchronises the device after each and so can't be left on. Here the object's methods are shadowed by
ones that a :class:`~training.engine.engine.step_clock.StepClock` times: two readings of the clock each, or on a GPU two
events.

What is counted is the time for which the pass or the update stands still. A collective on a stream of its own
(``overlap_comm``) runs beside the backward pass and is not counted; what the backward pass waits for it in the end
counts as backward.

Whoever has something to settle before a collective is called first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from training.engine.step_clock import StepClock

COLLECTIVES = (
    "all_reduce",
    "reduce",
    "reduce_scatter_tensor",
    "all_gather",
    "all_gather_into_tensor",
    "broadcast",
)


def time_collectives(clock: StepClock, before: Callable[[], None]) -> Callable[[], None]:
    """Have this clock time DeepSpeed's collectives within the phases of a step.

    Args:
        clock: times them.
        before: called before each; what it raises keeps this worker from joining in.

    Returns:
        What ends it.
    """
    from deepspeed.comm import comm

    backend = comm.cdb
    for name in COLLECTIVES:
        setattr(backend, name, _timed(getattr(type(backend), name).__get__(backend), clock, before))

    def end() -> None:
        for name in COLLECTIVES:
            vars(backend).pop(name, None)

    return end


def _timed(collective: Callable[..., Any], clock: StepClock, before: Callable[[], None]) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        before()
        with clock.collective():
            work = collective(*arguments, **options)
        return work if work is None or not options.get("async_op") else _TimedWork(work, clock)

    return timed


class _TimedWork:
    """A collective under way; waiting for it is what holds up."""

    def __init__(self, work: Any, clock: StepClock) -> None:
        self._work, self._clock = work, clock

    def wait(self, *arguments: Any) -> Any:
        with self._clock.collective():
            return self._work.wait(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
