"""Time of a step by phase, and real tokens per second.

A step lasts from the end of the previous step to its own end, without validation and checkpoints. Time in a nested
phase, such as a collective in the backward pass, counts only for the inner phase, so that the phases add up. On a GPU
phases are measured with CUDA events, which are read after the GPU has passed them. No step is synchronized, and a late
phase is read with the next step.

DeepSpeed's own timing of collectives (``comms_logger``) would synchronize after each. Here the methods of its backend
are replaced by timed ones. A collective on its own stream (``overlap_comm``) delays nothing and is not counted.
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
"""Phases in which the device works. In the others the host waits, except for communication inside one of these
phases."""

COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor", "broadcast")
"""Methods of ``deepspeed.comm.comm.cdb`` that DeepSpeed 0.19.8 calls for its collectives."""

CPU = torch.device("cpu")


class StepClock:
    """Timer of the steps and phases on ``device``."""

    def __init__(self, device: torch.device = CPU):
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
        """Time the block ``with clock.phase(name):``. Phases may be nested."""
        around = self._running[-1] if self._running else None
        # In a device phase the host runs far ahead: only events record when the device gets there.
        by_events = self._on_gpu and (name in ON_DEVICE or (around is not None and around.by_events))
        stream = torch.cuda.current_stream() if by_events else None
        phase = _Phase(name, by_events, stream, _now(by_events))
        self._running.append(phase)
        try:
            yield
        finally:
            self._running.pop()
            ended, outer = _now(by_events), around.name if around else None
            # Read events later: reading one that the device has not reached would block.
            if by_events:
                self._pending.append((phase, outer, ended))
            else:
                self._add(name, outer, ended - phase.began)

    def collective(self) -> AbstractContextManager[None]:
        """Time a collective inside a device phase as communication. On a GPU, only collectives on the phase's stream
        count."""
        around = self._running[-1] if self._running else None
        if around is None or around.name not in ON_DEVICE:
            return nullcontext()
        on_own_stream = self._on_gpu and torch.cuda.current_stream() != around.stream
        return nullcontext() if on_own_stream else self.phase("communication")

    def stepped(self, tokens: int, own_tokens: int = 0, budget_tokens: int = 0) -> None:
        """End a step with ``tokens`` real tokens in the global batch, ``own_tokens`` of them on this worker.

        ``budget_tokens``: token budget of this worker's batches in the step; 0 if unknown.
        """
        self._elapsed_s += time.perf_counter() - self._started
        self._tokens += tokens
        self._own_tokens += own_tokens
        self._budget_tokens += budget_tokens
        self._steps += 1

    def read(self) -> dict[str, float]:
        """Return means since the last call: seconds per step and phase, tokens per second, and the unused share of the
        budget.

        ``step_s`` includes ``data_wait_s`` and all phases except ``checkpoint_s``.
        """
        self._collect()
        steps, elapsed_s = max(1, self._steps), max(1e-9, self._elapsed_s)
        values: dict[str, float] = {
            "tokens": self._tokens,
            "tokens_per_s": self._tokens / elapsed_s,
            "step_s": elapsed_s / steps,
            "data_wait_s": self._data_wait_s / steps,
        }
        # An inner phase may be read before its outer phase, which then is negative here.
        values |= {f"{name}_s": max(0.0, self._phase_s[name]) / steps for name in PHASES}
        if self._budget_tokens:
            values["padding_share"] = 1 - self._own_tokens / self._budget_tokens
        self._reset()
        return values

    def _collect(self) -> None:
        # Events complete in stream order: if one is not reached, the later ones are not either.
        while self._pending and self._pending[0][2].query():
            phase, outer, ended = self._pending.popleft()
            self._add(phase.name, outer, phase.began.elapsed_time(ended) / 1000)

    def _add(self, name: Phase, outer: Phase | None, seconds: float) -> None:
        self._phase_s[name] += seconds
        if outer is not None:
            self._phase_s[outer] -= seconds

    def _reset(self) -> None:
        # Pending phases stay, and are read with the next steps.
        self._tokens = self._own_tokens = self._budget_tokens = self._steps = 0
        self._elapsed_s = self._data_wait_s = 0.0
        self._phase_s: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)


class _Phase(NamedTuple):
    """A running phase. ``began`` is a host time, or an event that the device may not have reached yet."""

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
    """Time DeepSpeed's collectives within the phases of a step. Returns the function that ends the timing.

    ``before`` is called before each collective. If it raises, this worker does not join the collective.
    """
    from deepspeed.comm import comm

    backend = comm.cdb
    # Set on the instance, not on its class: deleting the attributes restores DeepSpeed's own methods.
    for name in COLLECTIVES:
        setattr(backend, name, _timed(getattr(type(backend), name).__get__(backend), clock, before))

    def end() -> None:
        for name in COLLECTIVES:
            vars(backend).pop(name, None)

    return end


def _timed(collective: Callable[..., Any], clock: StepClock, before: Callable[[], None]) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        before()
        # A collective started with async_op takes its time in wait().
        with clock.collective():
            work = collective(*arguments, **options)
        return work if work is None or not options.get("async_op") else _TimedWork(work, clock)

    return timed


class _TimedWork:
    """Handle of a running collective; timed while waiting for it."""

    def __init__(self, work: Any, clock: StepClock) -> None:
        self._work, self._clock = work, clock

    def wait(self, *arguments: Any) -> Any:
        with self._clock.collective():
            return self._work.wait(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
