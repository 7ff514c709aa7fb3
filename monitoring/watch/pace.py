"""Speed of a run's last logged steps and what their time is spent on."""

from collections import deque
from typing import Any

from monitoring.advice import Facts
from run_folder.metrics_log import Record

_STEPS = 50
"""Logged steps over which everything is averaged."""
_STEP_PARTS = ("data_wait", "forward", "backward", "optimizer", "communication", "checkpoint")


class Pace:
    """The last steps since the run began or was resumed: what lies between two attempts is no part of a step."""

    def __init__(self) -> None:
        self._steps: deque[Record] = deque(maxlen=_STEPS)
        self._resumed = False

    def take(self, record: Record) -> None:
        if record["kind"] == "event" and record["event"] in ("started", "resumed"):
            self._resumed = True
        elif record["kind"] == "train":
            if self._resumed or (self._steps and record["step"] <= self._steps[-1]["step"]):
                self._steps.clear()
            self._resumed = False
            self._steps.append(record)

    def mean(self, name: str) -> float | None:
        """Return the mean of a value, None where no step has it."""
        known = [value for record in self._steps if (value := record.get(name)) is not None]
        return sum(known) / len(known) if known else None

    def tokens_per_s(self) -> float | None:
        """Return the harmonic mean: steps are of like size, so that these are tokens over time."""
        rates = [rate for record in self._steps if (rate := record.get("tokens_per_s"))]
        return len(rates) / sum(1 / rate for rate in rates) if rates else None

    def seconds_per_step(self) -> float | None:
        """Return the time by the clock, validations and checkpoints included."""
        if len(self._steps) < 2:
            return self.mean("step_s")
        first, last = self._steps[0], self._steps[-1]
        return max(0.0, (last["time"] - first["time"]) / max(1, last["step"] - first["step"]))

    def seconds_left(self, total_steps: int | None) -> float | None:
        """Return the time to the last step; None while it is not known."""
        step_s = self.seconds_per_step()
        if step_s is None or total_steps is None:
            return None
        return max(0.0, step_s * (total_steps - self._steps[-1]["step"]))

    def facts(self) -> Facts:
        """Return the shares of a step that its parts take, as far as they are known."""
        step_s = self.mean("step_s")
        if not step_s:
            return Facts()
        seconds = {name: self.mean(f"{name}_s") for name in _STEP_PARTS}
        shares: dict[str, Any] = {name: value / step_s for name, value in seconds.items() if value is not None}
        return Facts(**shares)
