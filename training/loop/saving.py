"""Saving: a checkpoint on disk, which the launcher hears of, and copies in memory between two of them.

In: the engine's state and the position of the loop. Out: files that are written in the background while training goes
on. Every worker makes the same calls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from esmeray.run_folder.checkpoints import Manifest, Position
from esmeray.training.checkpoints.writer import CheckpointWriter
from esmeray.training.engine.collective import ControlGroup
from esmeray.training.engine.engine import TrainingEngine
from esmeray.training.engine.memory_state import MemoryState
from esmeray.training.engine.weight_check import WeightsDifferError, differing_weights
from esmeray.training.loop.observers import Observers


@dataclass
class Saver:
    """Saves the state of one run.

    Attributes:
        memory: the copies in memory; None where there are none.
        template: the manifest of every checkpoint, but for what its step decides.
        names: files that go beside the shards; see :class:`~esmeray.training.tasks.experiment.Experiment`.
        report: tells the launcher of a checkpoint on disk.
        compares_weights: between the workers, before each save.
        total_steps: of the run; after the last of them no copy in memory is of use.
        saved_step: step of the newest checkpoint on disk.
    """

    engine: TrainingEngine
    control: ControlGroup
    observers: Observers
    writer: CheckpointWriter
    memory: MemoryState | None
    template: Manifest
    names: dict[str, bytes]
    report: Callable[[dict[str, float]], None]
    compares_weights: bool
    total_steps: int
    saved_step: int = 0

    def save(self, position: Position, validation_cost: float | None, on_disk: bool = True) -> None:
        """Start writing the state: a checkpoint, and a copy in memory where these are kept."""
        self.observers.watchdog.extend()
        # A wrong weight must not get into a checkpoint, which training would return to.
        self.check_weights()
        # Copied now, written in the background: the next step changes the weights in place.
        shards = self.engine.copy_shards(with_model=self.memory is not None)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        changes = {"position": position, "validation_cost": validation_cost, "created": created}
        manifest = self.template.model_copy(update=changes)
        if self.memory is not None and position.step < self.total_steps:
            self.memory.write(shards, manifest, self.control)
        if on_disk:
            shards = [(name, state) for name, state in shards if self.engine.writes(name)]
            if self.control.rank == 0:
                shards += self.names.items()
            self.writer.write(shards, manifest)
            self.saved_step = position.step
        self.observers.forget_peak()
        if on_disk:
            # Every worker, and after the same steps: Ray Train waits in its report for all of them.
            self.report({"step": float(position.step)})

    def check_weights(self) -> None:
        """Raise WeightsDifferError where they do between the workers, and log it."""
        if not self.compares_weights:
            return
        if problem := differing_weights(self.engine.module, self.control):
            self.writer.wait()
            if self.memory is not None:
                self.memory.close()  # nobody compared the weights of these copies
            message = f"at step {self.observers.step} {problem}"
            # At the checkpoint that training returns to: the log drops what comes after it.
            self.observers.log.event("weights_differ", self.saved_step, message=message)
            raise WeightsDifferError(problem)
