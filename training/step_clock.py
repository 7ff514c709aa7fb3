"""Where the time of a step goes, and real tokens per second."""

from __future__ import annotations

import time


class StepClock:
    """Measures from the end of one step to the end of the next; validation and checkpoints are left out.

    Args:
        log_every_steps: steps between logs.
    """

    def __init__(self, log_every_steps: int):
        self._every = log_every_steps
        self._reset()
        self.start()

    def start(self) -> None:
        """The next step begins now."""
        self._started = time.perf_counter()

    def loaded(self) -> None:
        """Its batches are here."""
        self._data_wait_s += time.perf_counter() - self._started

    def stepped(self, tokens: int) -> None:
        """It is done; ``tokens`` were real tokens of the global batch."""
        self._elapsed_s += time.perf_counter() - self._started
        self._tokens += tokens
        self._steps += 1

    def log_due(self, step: int) -> bool:
        """Whether the step that starts at this position is to be logged."""
        return (step + 1) % self._every == 0

    def read(self) -> dict[str, float]:
        """Means since the last call, in seconds and tokens per second."""
        steps, elapsed_s = max(1, self._steps), max(1e-9, self._elapsed_s)
        values = {
            "tokens": self._tokens,
            "tokens_per_s": self._tokens / elapsed_s,
            "step_s": elapsed_s / steps,
            "data_wait_s": self._data_wait_s / steps,
        }
        self._reset()
        return values

    def _reset(self) -> None:
        self._tokens = self._steps = 0
        self._elapsed_s = self._data_wait_s = 0.0
