"""Where the time of a step goes, and real tokens per second.

A step is the time from the end of one to the end of the next, without validation and checkpoints. The wait for batches
and each phase are parts of it, and what no phase covers (logging, copies to the device) is the rest. A phase inside
another, such as a collective inside the backward pass, counts as its own alone, so that phases add up.

On a GPU the phases that run there are measured between CUDA events, which are read once the GPU has passed them: no
step is synchronised for its times, and what is not done yet when figures are asked for comes with the next ones.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

Phase: TypeAlias = Literal["forward", "backward", "optimizer", "communication", "checkpoint"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer", "communication", "checkpoint")
ON_DEVICE = frozenset({"forward", "backward", "optimizer"})
"""Phases that are work of the device; the others keep the host waiting, but for communication inside one of these."""

CPU = torch.device("cpu")


class StepClock:
    """Measures steps and their phases.

    Args:
        log_every_steps: steps between logs.
        device: what the phases run on.
        budget_tokens: tokens that this worker's batches of a step have room for; 0 where that is not known.
    """

    def __init__(self, log_every_steps: int, device: torch.device = CPU, budget_tokens: int = 0):
        self._every = log_every_steps
        self._on_gpu = device.type == "cuda"
        self._budget_tokens = budget_tokens
        self._running: list[_Running] = []
        self._pending: deque[_Measured] = deque()
        self._events: list[Any] = []
        self._reset()
        self.start()

    def start(self) -> None:
        """The next step begins now."""
        self._started = time.perf_counter()

    def loaded(self) -> None:
        """Its batches are here."""
        self._data_wait_s += time.perf_counter() - self._started

    def phase(self, name: Phase) -> _Running:
        """Time what happens inside ``with clock.phase(name):``; phases may lie in one another."""
        return _Running(self, name)

    def collective(self) -> AbstractContextManager[None]:
        """Time a collective of the device as communication.

        Only inside a phase of the device, and on a GPU only on the stream that it runs on: on another it holds up
        nothing.
        """
        around = self._running[-1] if self._running else None
        if around is None or around.name not in ON_DEVICE:
            return nullcontext()
        if self._on_gpu and torch.cuda.current_stream() != around.stream:
            return nullcontext()
        return self.phase("communication")

    def stepped(self, tokens: int, own_tokens: int = 0) -> None:
        """It is done.

        Args:
            tokens: real tokens of the global batch.
            own_tokens: those of this worker.
        """
        self._elapsed_s += time.perf_counter() - self._started
        self._tokens += tokens
        self._own_tokens += own_tokens
        self._steps += 1

    def log_due(self, step: int) -> bool:
        """Whether the step that starts at this position is to be logged."""
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
        values |= {f"{name}_s": max(0.0, self._phase_s[name]) / steps for name in PHASES}
        if self._budget_tokens and self._steps:
            values["padding_share"] = 1 - self._own_tokens / (self._budget_tokens * self._steps)
        self._reset()
        return values

    def enter(self, running: _Running) -> None:
        """A phase begins; what :meth:`phase` gives calls it."""
        around = self._running[-1] if self._running else None
        running.by_events = self._on_gpu and (running.name in ON_DEVICE or (around is not None and around.by_events))
        if running.by_events:
            running.stream = torch.cuda.current_stream()
        running.began = self._now(running.by_events)
        self._running.append(running)

    def leave(self, running: _Running) -> None:
        """A phase ends."""
        self._running.pop()
        around = self._running[-1].name if self._running else None
        ended = self._now(running.by_events)
        if not running.by_events:
            self._add(running.name, around, ended - running.began)
        else:
            self._pending.append(_Measured(running.name, around, running.began, ended))

    def _now(self, by_events: bool) -> Any:
        """Seconds of the host, or an event on the device's stream."""
        if not by_events:
            return time.perf_counter()
        event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _collect(self) -> None:
        """Take the events that the device has passed, in their order."""
        while self._pending and self._pending[0].ended.query():
            done = self._pending.popleft()
            self._add(done.name, done.around, done.began.elapsed_time(done.ended) / 1000)
            self._events += [done.began, done.ended]

    def _add(self, name: Phase, around: Phase | None, seconds: float) -> None:
        self._phase_s[name] += seconds
        if around is not None:
            self._phase_s[around] -= seconds

    def _reset(self) -> None:
        self._tokens = self._own_tokens = self._steps = 0
        self._elapsed_s = self._data_wait_s = 0.0
        self._phase_s: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)


class _Running:
    """A phase under way."""

    __slots__ = ("_clock", "began", "by_events", "name", "stream")

    def __init__(self, clock: StepClock, name: Phase) -> None:
        self._clock, self.name = clock, name
        self.by_events = False
        self.began: Any = None
        self.stream: Any = None

    def __enter__(self) -> None:
        self._clock.enter(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.leave(self)


class _Measured(NamedTuple):
    """A phase between two events that the device may not have reached yet."""

    name: Phase
    around: Phase | None
    began: Any
    ended: Any
