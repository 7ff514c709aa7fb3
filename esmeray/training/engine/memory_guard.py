"""Out of memory while training: batches are split, and the run continues with the same result.

In: the settings, a memory meter, the run's folder. Out: the number of parts of every batch, in the folder too, so that
a resumed run does not run out again. Detecting it, reporting it to the other workers and repeating the step are
:mod:`esmeray.training.loop.stepping`'s. Splitting changes no sum: losses and gradients are those of whole batches, to
rounding, but where a model draws random numbers (dropout) it draws others.
"""

import json
from collections.abc import Callable
from pathlib import Path

from esmeray.cluster.collective import ControlGroup
from esmeray.common.errors import ResourceError
from esmeray.common.publishing import write_atomically
from esmeray.monitoring.sampling.memory_meter import MemoryMeter
from esmeray.training.section import MemoryGuardSection

REMEDY = (
    "set model.backbone.gradient_checkpointing true and resume, or lower batch.tokens, or data.max_length for long "
    "sequences, under another run.name"
)


class NewStartError(ResourceError):
    """Out of memory where only a new start from the last checkpoint helps; batches are split from there on."""

    retryable = True


class MemoryGuard:
    """The number of parts that batches are split into, alike on every worker, kept in the file ``path``.

    ``report`` is called on every worker, with one line and the parts, when they become more.
    """

    def __init__(
        self,
        section: MemoryGuardSection,
        meter: MemoryMeter,
        path: Path,
        report: Callable[[str, int], None],
    ) -> None:
        self._section, self._path, self._report = section, path, report
        self.meter = meter
        self.parts = 1

    def restore(self, control: ControlGroup) -> bool:
        """Restore the number of parts that this run came to before; True for more than one. Every worker calls it."""
        saved = json.loads(self._path.read_text()) if control.rank == 0 and self._path.exists() else {"parts": 1}
        self.parts = control.from_rank_0(saved)["parts"]
        return self.parts > 1

    def halve(self, reason: str) -> None:
        """Double the parts and free memory; ResourceError after as many times as may be. Every worker calls it."""
        self._double()
        # Or the peak of the pass that was broken off would count against the next.
        self.meter.free()
        self._report(
            f"{reason}: every batch is taken in {self.parts} parts from here on, with the same result", self.parts
        )

    def start_anew(self, reason: str) -> NewStartError:
        """Double the parts; returns what to raise. One worker calls it."""
        self._double()
        return NewStartError(
            f"{reason}: training starts again from the last checkpoint, with every batch in {self.parts} parts"
        )

    def refuse_to_split(self, tokens: int) -> ResourceError:
        return ResourceError(f"out of memory on a single sequence of {tokens} tokens, which can't be split: {REMEDY}")

    def _double(self) -> None:
        if self.parts >= 2**self._section.max_halvings:
            halved = f", also with batches in {self.parts} parts" if self.parts > 1 else ""
            raise ResourceError(f"out of memory{halved}: {REMEDY}")
        self.parts *= 2
        # At once: a process that is killed for its memory would begin with whole batches again.
        write_atomically(self._path, json.dumps({"parts": self.parts}) + "\n")
