"""Time of a step by phase, and real tokens per second.

A step lasts from the end of one to the end of the next, without validation and checkpoints. A phase inside another,
such as a collective inside the backward pass, counts as its own alone, so that phases add up. On a GPU phases lie
between CUDA events, read once the GPU has passed them: no step is synchronised, and a late phase is read with the next.
DeepSpeed's own timing of collectives (``comms_logger``) would synchronise after each. Here methods of its backend are
shadowed by timed ones; a collective on a stream of its own (``overlap_comm``) holds up nothing and is not counted.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

Phase: TypeAlias = Literal["forward", "backward", "optimizer", "communication", "checkpoint"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer", "communication", "checkpoint")
ON_DEVICE = frozenset({"forward", "backward", "optimizer"})
"""Phases that are work of the device; the others keep the host waiting, but for communication inside one of these."""

COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor", "broadcast")
"""Methods of ``deepspeed.comm.comm.cdb``, on which DeepSpeed 0.19.8 calls every collective."""

CPU = torch.device("cpu")


class StepClock:
    """Steps and their phases on ``device``."""

    def __init__(self, log_every_steps: int, device: torch.device = CPU):
        self._every = log_every_steps
        self._on_gpu = device.type == "cuda"
        self._running: list[_Phase] = []
        self._pending: deque[tuple[_Phase, Phase | None, Any]] = deque()
        self._reset()
        self.start()

    def start(self) -> None:
        self._started = time.perf_counter()

    def loaded(self) -> None:
        self._data_wait_s += time.perf_counter() - self._started

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Time what happens inside ``with clock.phase(name):``; phases may lie in one another."""
        around = self._running[-1] if self._running else None
        # In a phase of the device the host is far ahead: only events know when the device got there.
        by_events = self._on_gpu and (name in ON_DEVICE or (around is not None and around.by_events))
        stream = torch.cuda.current_stream() if by_events else None
        phase = _Phase(name, by_events, stream, _now(by_events))
        self._running.append(phase)
        try:
            yield
        finally:
            self._running.pop()
            ended, outer = _now(by_events), around.name if around else None
            # Read later: an event that the device has not reached would have to be waited for.
            if by_events:
                self._pending.append((phase, outer, ended))
            else:
                self._add(name, outer, ended - phase.began)

    def collective(self) -> AbstractContextManager[None]:
        """Time a collective inside a phase of the device as communication; on a GPU only on the phase's own stream."""
        around = self._running[-1] if self._running else None
        if around is None or around.name not in ON_DEVICE:
            return nullcontext()
        beside = self._on_gpu and torch.cuda.current_stream() != around.stream
        return nullcontext() if beside else self.phase("communication")

    def stepped(self, tokens: int, own_tokens: int = 0, budget_tokens: int = 0) -> None:
        """End the step of so many real tokens in the global batch, ``own_tokens`` of them this worker's.

        ``budget_tokens``: what this worker's batches could have had, 0 if not known.
        """
        self._elapsed_s += time.perf_counter() - self._started
        self._tokens += tokens
        self._own_tokens += own_tokens
        self._budget_tokens += budget_tokens
        self._steps += 1

    def log_due(self, step: int) -> bool:
        """True where the step that starts at this position is to be logged."""
        return (step + 1) % self._every == 0

    def read(self) -> dict[str, float]:
        """Means since the last call: seconds a step, tokens per second, and the share of the budget left empty.

        ``checkpoint_s`` is no part of ``step_s``; the other phases and ``data_wait_s`` are.
        """
        self._collect()
        steps, elapsed_s = max(1, self._steps), max(1e-9, self._elapsed_s)
        values: dict[str, float] = {
            "tokens": self._tokens,
            "tokens_per_s": self._tokens / elapsed_s,
            "step_s": elapsed_s / steps,
            "data_wait_s": self._data_wait_s / steps,
        }
        # An inner phase that is read before its outer one has been taken off it already.
        values |= {f"{name}_s": max(0.0, self._phase_s[name]) / steps for name in PHASES}
        if self._budget_tokens:
            values["padding_share"] = 1 - self._own_tokens / self._budget_tokens
        self._reset()
        return values

    def _collect(self) -> None:
        # In the order of the stream: what follows one that is not reached is not reached either.
        while self._pending and self._pending[0][2].query():
            phase, outer, ended = self._pending.popleft()
            self._add(phase.name, outer, phase.began.elapsed_time(ended) / 1000)

    def _add(self, name: Phase, outer: Phase | None, seconds: float) -> None:
        self._phase_s[name] += seconds
        if outer is not None:
            self._phase_s[outer] -= seconds

    def _reset(self) -> None:
        # But for what is pending, which is read with the next steps.
        self._tokens = self._own_tokens = self._budget_tokens = self._steps = 0
        self._elapsed_s = self._data_wait_s = 0.0
        self._phase_s: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)


class _Phase(NamedTuple):
    """A phase under way; ``began`` is a time of the host, or an event that the device may not have reached yet."""

    name: Phase
    by_events: bool
    stream: Any
    began: Any


def _now(by_events: bool) -> Any:
    if not by_events:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def time_collectives(clock: StepClock, before: Callable[[], None]) -> Callable[[], None]:
    """Have this clock time DeepSpeed's collectives within the phases of a step; returns what ends it.

    ``before`` is called before each; what it raises keeps this worker from joining in.
    """
    from deepspeed.comm import comm

    backend = comm.cdb
    # On the object, not on its class, so that DeepSpeed's own are back when these are removed.
    for name in COLLECTIVES:
        setattr(backend, name, _timed(getattr(type(backend), name).__get__(backend), clock, before))

    def end() -> None:
        for name in COLLECTIVES:
            vars(backend).pop(name, None)

    return end


def _timed(collective: Callable[..., Any], clock: StepClock, before: Callable[[], None]) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        before()
        # Started with async_op, what takes time is the wait.
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
