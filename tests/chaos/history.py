"""The history that workers append to, and a check that training was one sequence of the planned steps.

The history has JSON lines of two kinds:

- ``start``: a worker starts after ``step`` steps; the workers of one start share an ``attempt``;
- ``step``: a worker has taken a step; with hashes of its batches' records, the bits of its loss and a checksum of all
  weights.

Times are from CLOCK_MONOTONIC, which all processes of a machine share.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOLERANCE = 1e-5
"""Tolerance for losses and weights after a change of the number of workers, which changes the order of sums."""


@dataclass
class Attempt:
    """A start of ``world`` workers after ``begins`` steps, with their pids and their records per step."""

    world: int
    begins: int
    time: float
    pids: set[int] = field(default_factory=set)
    steps: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def ended(self, number: int) -> float:
        """Time of the end of a step, or of the start if the step was taken in an earlier attempt."""
        return max((step["time"] for step in self.steps.get(number, [])), default=self.time)


def read_history(path: Path) -> list[Attempt]:
    """Return the attempts in the order of their starts."""
    attempts: dict[str, Attempt] = {}
    for record in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        attempt = attempts.setdefault(record["attempt"], Attempt(record["world"], record["step"], record["time"]))
        if record["kind"] == "start":
            attempt.pids.add(record["pid"])
        else:
            attempt.steps.setdefault(record["step"], []).append(record)
    return sorted(attempts.values(), key=lambda attempt: attempt.time)


def committed(attempts: list[Attempt]) -> dict[int, Attempt]:
    """Return, per step, the attempt whose result counts: an attempt discards all earlier steps after its beginning."""
    taken: dict[int, Attempt] = {}
    limit = max((number for attempt in attempts for number in attempt.steps), default=0)
    for attempt in reversed(attempts):
        taken |= {number: attempt for number in attempt.steps if number <= limit}
        limit = min(limit, attempt.begins)
    return dict(sorted(taken.items()))


def problems(attempts: list[Attempt], planned: Attempt) -> list[str]:
    """Return the differences between a run and ``planned``, the attempt of an undisturbed run."""
    taken = committed(attempts)
    differences = [f"step {number} is lost or not planned" for number in planned.steps.keys() ^ taken.keys()]
    is_exact = True
    for number in sorted(taken.keys() & planned.steps.keys()):
        attempt, wanted = taken[number], planned.steps[number]
        steps = sorted(attempt.steps[number], key=lambda step: step["rank"])
        is_exact &= attempt.world == planned.world
        tests = {
            "was not taken once by each worker": [step["rank"] for step in steps] == [*range(attempt.world)],
            "had other batches than planned": _batches(steps) == _batches(wanted),
            "left other weights on another worker": len({step["weights"] for step in steps}) == 1,
            "computed other bits": not is_exact or _bits(steps) == _bits(wanted),
            "had another loss": abs(_loss(steps) - _loss(wanted)) <= TOLERANCE * max(1, abs(_loss(wanted))),
        }
        differences += [f"step {number} {problem}" for problem, holds in tests.items() if not holds]
    began = float("inf")
    for attempt in reversed(attempts):
        late = [number for number in attempt.steps if attempt.ended(number) > began]
        differences += [f"step {number} was taken while a later attempt took steps" for number in late]
        began = min([began, *(step["time"] for steps in attempt.steps.values() for step in steps)])
    return differences


def _batches(steps: list[dict[str, Any]]) -> Counter[str]:
    return Counter(batch for step in steps for batch in step["batches"])


def _bits(steps: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {(step["rank"], *step["batches"], step["loss"], step["weights"]) for step in steps}


def _loss(steps: list[dict[str, Any]]) -> float:
    return sum(float.fromhex(step["loss"]) for step in steps)


def seconds_to_a_step(attempts: list[Attempt], time: float, until: float) -> float | None:
    """Seconds from a fault to the next step, before the next fault at ``until``; None if there is no such step.

    Only attempts that started in this interval count, if there are any.
    """
    later = [attempt for attempt in attempts if time < attempt.time < until] or attempts
    ends = [attempt.ended(number) for attempt in later for number in attempt.steps]
    return min((end - time for end in ends if time < end < until), default=None)
