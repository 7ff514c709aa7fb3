"""Two programs that compute in alternate slices of some seconds, each alone: their speed on a machine that others use.

The speed of the same program differs by 10 % from one minute to the next on a shared machine, and by far less between
neighbouring seconds. So both are started, and while one computes all processes of the other are stopped (SIGSTOP).
In turns that rotate (A B, B A, ...) a drift cancels, and many slices average the rest out.

Counted are the steps that lie wholly within a slice: from the end of one step to that of another, by the time stamps of
the program's metrics.jsonl, with whatever happens between steps. Not counted are the step that the stop fell into and
what a program does in its first :data:`SETTLE_S` after it goes on, with cold caches and overdue timers.

Timers of a stopped program go on: what it does every five seconds of the clock it does up to twice as often in the time
that it computes, so that what such work costs is overstated, never understated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.process_family import ProcessFamily
from run_folder.metrics_log import MetricsTail

Record = dict[str, Any]

SETTLE_S = 0.3
LEAST_STEPS = 4
"""Whole steps in a slice: one that holds fewer goes on until it has them."""
LONGEST_S = 60.0
_POLL_S = 0.05


@dataclass
class SlicedProgram:
    """A program that writes metrics.jsonl and may be stopped.

    Attributes:
        family: its processes.
        metrics: path of its metrics.jsonl, which needs a line a step.
        check: raises where the program has ended or does not do what it should.
        computing: how many of its threads compute: those that took most of a slice.
        losses: of its steps so far.
        cpu_s, beside_s, tokens: CPU time of all its processes in slices so far, that of all threads but the computing
            ones, and the tokens that it trained meanwhile.
    """

    family: ProcessFamily
    metrics: Path
    check: Callable[[], None] = lambda: None
    computing: int = 1
    losses: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    beside_s: float = 0.0
    tokens: float = 0.0

    def __post_init__(self) -> None:
        self._tail = MetricsTail(self.metrics)

    def new_steps(self) -> list[Record]:
        """Records of the steps since the last call."""
        records = [record for record in self._tail.poll() if record["kind"] == "train"]
        self.losses += [record["loss"] for record in records]
        return records

    def speed(self, slice_s: float) -> float:
        """Tokens per second of so many seconds from now on.

        Raises:
            RuntimeError: it makes no steps.
        """
        before = self.family.thread_times_s()
        self.new_steps()
        start_s = time.time()
        records: list[Record] = []
        while True:
            time.sleep(_POLL_S if time.time() - start_s > slice_s else slice_s)
            records += self.new_steps()
            elapsed_s = time.time() - start_s
            self.check()
            if len(records) > LEAST_STEPS:
                break
            if elapsed_s > LONGEST_S:
                raise RuntimeError(f"{self.metrics}: {len(records)} steps in {elapsed_s:.0f} s")
        speed = speed_of(records)
        self.tokens += speed * (time.time() - start_s)
        after = self.family.thread_times_s()
        taken = sorted(seconds - before.get(thread, 0.0) for thread, seconds in after.items())
        self.cpu_s += sum(taken)
        self.beside_s += sum(taken[: -self.computing])
        return speed


class Turns:
    """Lets one program at a time compute.

    Args:
        families: the programs' processes, by name; all of them run when this is made.
        settle_s: seconds after a program went on that are not counted.
    """

    def __init__(self, families: Mapping[str, ProcessFamily], settle_s: float = SETTLE_S) -> None:
        self._families, self._settle_s = families, settle_s
        self._running = set(families)

    def give(self, name: str) -> None:
        """Stop the others and let this one go on; return when it has settled."""
        if self._running == {name}:
            return
        for other in self._running - {name}:
            self._families[other].stop()
        self._families[name].go_on()
        self._running = {name}
        time.sleep(self._settle_s)


class Slices:
    """The speed of training programs that take turns.

    Args:
        programs: by name; all of them run when this is made.
        slice_s: seconds of a slice, beside what is not counted of it.
        settle_s: see :class:`Turns`.
    """

    def __init__(self, programs: Mapping[str, SlicedProgram], slice_s: float, settle_s: float = SETTLE_S) -> None:
        self._programs, self._slice_s = programs, slice_s
        self._turns = Turns({name: program.family for name, program in programs.items()}, settle_s)

    def speed(self, name: str) -> float:
        """Tokens per second of the next slice, which is this program's.

        Raises:
            RuntimeError: it makes no steps.
        """
        self._turns.give(name)
        return self._programs[name].speed(self._slice_s)


def speed_of(records: Sequence[Record]) -> float:
    """Tokens per second between the end of the first of these steps and that of the last."""
    return sum(record["tokens"] for record in records[1:]) / (records[-1]["time"] - records[0]["time"])
