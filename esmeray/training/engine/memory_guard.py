"""Out of memory in training: split the batches and continue the run with the same result.

The guard holds the number of parts per batch, the same on every worker. It also writes the number to the run's folder,
so that a resumed run does not go out of memory again. :mod:`esmeray.training.loop.stepping` detects out of memory,
tells the other workers and repeats the step. Splitting changes no sum: losses and gradients of whole and split
batches are equal up to rounding. If a model draws random numbers (dropout), it draws different ones.
"""

import json
from collections.abc import Callable
from pathlib import Path

from esmeray.cluster.collective import ControlGroup
from esmeray.common.errors import ResourceError
from esmeray.common.publishing import write_atomically
from esmeray.monitoring.sampling.memory_meter import MemoryMeter

MAX_HALVINGS = 3
"""Maximum number of times that batches are halved in a run: beyond it the steps are slow for other reasons."""
REMEDY = (
    "set model.backbone.gradient_checkpointing true and resume, or lower batch.tokens (or data.max_length for "
    "long sequences) with another run.name"
)


class NewStartError(ResourceError):
    """Out of memory that only a restart from the last checkpoint resolves. Batches are split from then on."""

    retryable = True


class MemoryGuard:
    """The number of parts per batch, the same on every worker, stored in the file ``path``.

    When the number of parts grows, ``report`` is called on every worker with a message and the number.
    """

    def __init__(
        self,
        meter: MemoryMeter,
        path: Path,
        report: Callable[[str, int], None],
    ) -> None:
        self._path, self._report = path, report
        self.meter = meter
        self.parts = 1

    def restore(self, control: ControlGroup) -> bool:
        """Restore the number of parts of an earlier attempt; return True if it is more than one. Every worker calls
        it."""
        saved = json.loads(self._path.read_text()) if control.rank == 0 and self._path.exists() else {"parts": 1}
        self.parts = control.from_rank_0(saved)["parts"]
        return self.parts > 1

    def halve(self, reason: str) -> None:
        """Double the number of parts and free memory. Raises ResourceError at the limit. Every worker calls it."""
        self._double()
        # Otherwise the peak of the failed pass would count against the next pass.
        self.meter.free()
        self._report(
            f"{reason}: from now on every batch is split into {self.parts} micro-batches, with the same result",
            self.parts,
        )

    def start_anew(self, reason: str) -> NewStartError:
        """Double the number of parts and return the error to raise. One worker calls it."""
        self._double()
        return NewStartError(
            f"{reason}: training restarts from the last checkpoint, with every batch split into {self.parts} "
            "micro-batches"
        )

    def _double(self) -> None:
        if self.parts >= 2**MAX_HALVINGS:
            halved = f", even with batches split into {self.parts} micro-batches" if self.parts > 1 else ""
            raise ResourceError(f"out of memory{halved}: {REMEDY}")
        self.parts *= 2
        # Write now: a process that is killed for its memory would otherwise restart with whole batches.
        write_atomically(self._path, json.dumps({"parts": self.parts}) + "\n")


def refuse_to_split(tokens: int) -> ResourceError:
    return ResourceError(f"out of memory on a single sequence of {tokens} tokens, which can't be split: {REMEDY}")
