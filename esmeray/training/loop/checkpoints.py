"""The checkpoints of a run as its loop has them: saved in the background, restored when it starts, returned to.

In: the engine's state and the position of the loop. Out: a checkpoint on disk, of which the launcher hears, copies in
memory between two of them, and the newest of both that is intact. A run that saved one never starts from step 0
silently. Every worker makes the same calls.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from esmeray.cluster.collective import ControlGroup
from esmeray.common.errors import CheckpointError, DataError
from esmeray.dataset.batches.steps import TrainingSteps
from esmeray.run_folder.checkpoints import CheckpointFolder, CheckpointStore, Manifest, Position
from esmeray.run_folder.mirror import RunMirror
from esmeray.training.checkpoints.writer import CheckpointWriter
from esmeray.training.config import Config
from esmeray.training.engine.engine import TrainingEngine
from esmeray.training.engine.memory_state import MemoryState
from esmeray.training.engine.weight_check import WeightsDifferError, differing_weights
from esmeray.training.loop.observing import Observers
from esmeray.training.loop.schedules import Course, course_of
from esmeray.training.section import TrainingSection


@dataclass
class Saver:
    """The writing side of one run's checkpoints.

    Attributes:
        memory: the copies in memory; None where there are none.
        template: the manifest of every checkpoint, but for what its step decides.
        names: files that go beside the shards; see :class:`~esmeray.tasks.experiment.Experiment`.
        report: reports a checkpoint on disk to the launcher.
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
        manifest = self.template.model_copy(
            update={"position": position, "validation_cost": validation_cost, "created": created}
        )
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
            # At the checkpoint that training returns to: the log drops what comes after it.
            self.observers.log.event(
                "weights_differ", self.saved_step, message=f"at step {self.observers.step} {problem}"
            )
            raise WeightsDifferError(problem)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run where this worker reads them: in the run's folder, or at its URI.

    Attributes:
        leads: of the workers that see the same folder, this one does what is done once for each folder.
        is_needed: a run without a checkpoint is refused.
        course, batches: what this attempt trains by, and on.
    """

    store: CheckpointStore
    mirror: RunMirror
    control: ControlGroup
    observers: Observers
    leads: bool
    is_needed: bool
    course: Course
    batches: TrainingSteps

    def newest(
        self, copies: Iterable[CheckpointFolder] = (), finite: bool = False
    ) -> tuple[CheckpointFolder | None, list[str]]:
        """The newest intact checkpoint, and warnings about newer ones; None where the run never completed one.

        ``copies`` in memory count as well; ``finite``: of those whose last step was so. Every worker checks the files
        of its own rank, and a share of those of ranks that have no worker any more. Raises CheckpointError where there
        are checkpoints on disk and none can be used.
        """
        warnings: list[str] = []
        # Rank 0's list: others may see a shared file system as it was a moment ago.
        names = self.control.from_rank_0([folder.path.name for folder in self.store.complete()])
        on_disk = [CheckpointFolder(self.store.root / name) for name in names]
        for folder in sorted([*on_disk, *copies], key=lambda folder: folder.step, reverse=True):
            problem = self._problem_of(folder, finite)
            # All take the same one: a part that is damaged on one worker is of no use to the others.
            is_intact = self.control.all_true(not problem)
            self.observers.watchdog.extend()  # checking large files took long, and so may reading them
            if is_intact:
                return folder, warnings
            if folder in on_disk:
                reason = problem or "another worker found its part of it damaged"
                warnings.append(f"{folder.path.name} can't be used: {reason}")
        if warnings:
            raise CheckpointError(
                f"{self.store.root}: no checkpoint can be used ({'; '.join(warnings)}): "
                "restore one from a copy, or start anew under another run.name"
            )
        return None, []

    def load(self, folder: CheckpointFolder, engine: TrainingEngine) -> None:
        engine.load_shards(self.mirror.fetched(folder))

    def _problem_of(self, folder: CheckpointFolder, finite: bool) -> str:
        try:
            whole = self.mirror.fetched(folder)
            written_by = whole.manifest().world_size
            manifest = whole.verify(range(self.control.rank, written_by, self.control.world_size))
            if finite and manifest.position.nonfinite_in_a_row:
                return "its last step was not finite"
            if self._decayed_otherwise(whole):
                return "its learning rate had begun to decay for an earlier end of training"
        except (CheckpointError, DataError) as error:
            return str(error)
        return ""

    def _decayed_otherwise(self, folder: CheckpointFolder) -> bool:
        """Test for a checkpoint of wsd's decay, where training has been given another end, or decay, since then."""
        if self.course.branch_step is None:
            return False
        earlier = course_of(folder.settings(Config).training, self.batches)
        # Weights whose rate has decayed would be trained at the full rate again: from before it, the run can be
        # prolonged.
        return earlier != self.course and earlier.branch_step is not None and folder.step > earlier.branch_step


def restore(checkpoints: Checkpoints, saver: Saver) -> Position:
    """Resume from the newest intact checkpoint; the start where there is none. Every worker calls it."""
    store, control, log = checkpoints.store, checkpoints.control, checkpoints.observers.log
    if checkpoints.leads:
        store.root.mkdir(parents=True, exist_ok=True)
        store.sweep()
    control.all_true(True)  # nobody looks before it is swept
    # Those that every worker has a part of: a lost one took its own along.
    folder, warnings = checkpoints.newest([] if saver.memory is None else saver.memory.common(control))
    if folder is None:
        _refuse_to_begin_again(checkpoints)
        position = Position()
        log.rewind(-1)  # an attempt that saved nothing may have logged steps, which come again
    else:
        position = folder.manifest().position
        log.rewind(position.step)
        for warning in warnings:
            log.event("warning", position.step, message=warning)
        checkpoints.load(folder, saver.engine)
        control.all_true(True)  # nobody renames before everybody has read
        in_memory = folder.path.parent != store.root
        # A copy in memory is no checkpoint: a worker that is lost takes it along.
        saver.saved_step = 0 if in_memory else position.step
        if checkpoints.leads:
            # Later ones are of steps that are taken again, perhaps with other settings: two histories would mix.
            store.discard_after(position.step - in_memory)
            if not in_memory:
                store.write_latest(folder)
        log.event(
            "resumed",
            position.step,
            checkpoint=folder.path.name + " in memory" * in_memory,
            total_steps=checkpoints.course.total_steps,
            workers=control.world_size,
        )
    if checkpoints.leads:
        checkpoints.mirror.start(position.step)
    if saver.memory is not None:
        saver.memory.discard_after(position.step)
    return position


def rewind(checkpoints: Checkpoints, saver: Saver, training: TrainingSection, position: Position) -> bool:
    """Load weights and optimizer of the newest checkpoint from before the steps that were not finite.

    Training continues at ``position``: the batches since that checkpoint are left out. False where it has to end:
    by ``training.on_divergence``, after as many rewinds as may be, or without such a checkpoint. Every worker calls it.
    """
    if training.on_divergence == "stop":
        return False
    checkpoints.observers.watchdog.extend()
    saver.writer.wait()  # the newest checkpoint may be half-written
    # Counted in the log, which outlives the process: a run that is resumed has as many tries as one that was not.
    records = checkpoints.observers.records()
    rewinds = checkpoints.control.from_rank_0(sum(record.get("event") == "rewound" for record in records))
    if rewinds >= training.max_rewinds:
        return False
    try:
        folder, _ = checkpoints.newest(finite=True)
    except CheckpointError:
        folder = None
    if folder is None:
        return False
    checkpoints.load(folder, saver.engine)
    message = (
        f"loss or gradient was not finite in {position.nonfinite_in_a_row} steps in a row: weights and optimizer are "
        f"again those of step {folder.step}, the batches since then are left out (rewind {rewinds + 1} of at most "
        f"{training.max_rewinds})"
    )
    checkpoints.observers.log.event("rewound", position.step, message=message)
    return True


def _refuse_to_begin_again(checkpoints: Checkpoints) -> None:
    """Refuse step 0 for a run that saved a checkpoint once, or where ``run.resume`` is ``must``."""
    records = checkpoints.observers.records()
    saved_steps = [record["step"] for record in records if record.get("event") == "checkpoint"]
    saved_step = checkpoints.control.from_rank_0(max(saved_steps, default=0))
    if saved_step > 0:
        raise CheckpointError(
            f"{checkpoints.store.root}: there is no checkpoint, but the run saved one at step {saved_step}: "
            "restore the folder, or start anew under another run.name"
        )
    if checkpoints.is_needed:
        raise CheckpointError(
            f"{checkpoints.store.root}: there is no checkpoint, and run.resume is 'must': set it to 'allow'"
        )
