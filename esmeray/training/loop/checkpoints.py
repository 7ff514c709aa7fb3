"""The checkpoints of a run in its loop: saved in the background, restored at the start, and returned to by a rewind.

A checkpoint on disk is reported to the launcher; between two of them come copies in memory. A run resumes from the
newest intact checkpoint or copy. A run that saved one never silently restarts from step 0. Every worker makes the same
calls.
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
        memory: the copies in memory; None if there are none.
        template: the manifest of every checkpoint, without the values that depend on the step.
        names: files saved next to the shards; see :class:`~esmeray.tasks.experiment.Experiment`.
        report: reports a checkpoint on disk to the launcher.
        compares_weights: compare the weights across workers before each save.
        total_steps: steps of the run; after the last one, no copy in memory is needed.
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
        """Start writing the state: a checkpoint if ``on_disk``, and a copy in memory if copies are kept."""
        self.observers.watchdog.extend()
        # Corrupt weights must not get into a checkpoint that training would return to.
        self.check_weights()
        # Copied now, since the next step changes the weights in place; written in the background.
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
            # Every worker reports, after the same steps: Ray Train's report waits for all of them.
            self.report({"step": float(position.step)})

    def check_weights(self) -> None:
        """Compare the weights across workers. If they differ, log it and raise WeightsDifferError."""
        if not self.compares_weights:
            return
        if problem := differing_weights(self.engine.module, self.control):
            self.writer.wait()
            if self.memory is not None:
                self.memory.close()  # the weights of these copies were never compared
            # Logged at the step of the checkpoint that training returns to: the log drops later lines.
            self.observers.log.event(
                "weights_differ", self.saved_step, message=f"at step {self.observers.step} {problem}"
            )
            raise WeightsDifferError(problem)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run as this worker reads them: in the run's folder or at its URI.

    Attributes:
        leads: this worker is the first of those that share its folder, and does the work that is done once per folder.
        is_needed: a run without a checkpoint is refused.
        course, batches: steps and batches of this attempt.
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
        """Find the newest intact checkpoint. Returns it, or None if the run never completed one, and warnings about
        newer ones.

        ``copies`` in memory are candidates as well. ``finite``: only checkpoints whose last step was finite. Every
        worker checks the files of its own rank, and a share of the files of ranks that no longer have a worker. Raises
        CheckpointError if there are checkpoints on disk but none can be used.
        """
        warnings: list[str] = []
        # Use rank 0's list: other nodes may see an older state of a shared file system.
        names = self.control.from_rank_0([folder.path.name for folder in self.store.complete()])
        on_disk = [CheckpointFolder(self.store.root / name) for name in names]
        for folder in sorted([*on_disk, *copies], key=lambda folder: folder.step, reverse=True):
            problem = self._problem_of(folder, finite)
            # All workers use the same checkpoint, so a part that is damaged on one worker rules it out for all.
            is_intact = self.control.all_true(not problem)
            self.observers.watchdog.extend()  # checking large files took long, and reading them may as well
            if is_intact:
                return folder, warnings
            if folder in on_disk:
                reason = problem or "another worker's part is damaged"
                warnings.append(f"{folder.path.name} can't be used: {reason}")
        if warnings:
            raise CheckpointError(
                f"{self.store.root}: no usable checkpoint ({'; '.join(warnings)}): restore one from a copy, or "
                "restart with another run.name"
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
                return "its last loss or gradient was not finite"
            if self._decayed_otherwise(whole):
                return "its learning rate was already decaying towards an earlier end of training"
        except (CheckpointError, DataError) as error:
            return str(error)
        return ""

    def _decayed_otherwise(self, folder: CheckpointFolder) -> bool:
        """Test whether a checkpoint is from wsd's decay, and the end of training or the decay was changed since."""
        if self.course.branch_step is None:
            return False
        earlier = course_of(folder.settings(Config).training, self.batches)
        # Weights whose rate has decayed would be trained at the full rate again. Only from before the decay can the run
        # be prolonged.
        return earlier != self.course and earlier.branch_step is not None and folder.step > earlier.branch_step


def restore(checkpoints: Checkpoints, saver: Saver) -> Position:
    """Resume from the newest intact checkpoint, or start at step 0 if there is none. Every worker calls it."""
    store, control, log = checkpoints.store, checkpoints.control, checkpoints.observers.log
    if checkpoints.leads:
        store.root.mkdir(parents=True, exist_ok=True)
        store.sweep()
    control.all_true(True)  # nobody looks before the leaders have swept
    # Use the copies that every worker has a part of: a lost worker's copies are lost as well.
    folder, warnings = checkpoints.newest([] if saver.memory is None else saver.memory.common(control))
    if folder is None:
        _refuse_to_begin_again(checkpoints)
        position = Position()
        log.rewind(-1)  # an attempt that saved nothing may have logged steps, which are repeated
    else:
        position = folder.manifest().position
        log.rewind(position.step)
        for warning in warnings:
            log.event("warning", position.step, message=warning)
        checkpoints.load(folder, saver.engine)
        control.all_true(True)  # nobody renames before all have read
        in_memory = folder.path.parent != store.root
        # A copy in memory does not count as a checkpoint: it is lost with its worker.
        saver.saved_step = 0 if in_memory else position.step
        if checkpoints.leads:
            # Later checkpoints are from steps that are repeated, perhaps with other settings: two histories would mix.
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
    """Load weights and optimizer of the newest checkpoint before the steps that were not finite.

    Training continues at ``position``: the batches since that checkpoint are left out. Returns False if the run has to
    end: ``training.on_divergence`` is stop, the maximum of rewinds is reached, or there is no such checkpoint. Every
    worker calls it.
    """
    if training.on_divergence == "stop":
        return False
    checkpoints.observers.watchdog.extend()
    saver.writer.wait()  # the newest checkpoint may be half-written
    # Counted in the log, which outlives the process, so that resuming does not add rewinds.
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
        f"loss or gradient was not finite in {position.nonfinite_in_a_row} steps in a row: weights and "
        f"optimizer are reset to step {folder.step}, and the batches since then are skipped (rewind "
        f"{rewinds + 1} of at most {training.max_rewinds})"
    )
    checkpoints.observers.log.event("rewound", position.step, message=message)
    return True


def _refuse_to_begin_again(checkpoints: Checkpoints) -> None:
    """Raise CheckpointError at step 0 if the run saved a checkpoint before, or ``run.resume`` is ``must``."""
    records = checkpoints.observers.records()
    saved_steps = [record["step"] for record in records if record.get("event") == "checkpoint"]
    saved_step = checkpoints.control.from_rank_0(max(saved_steps, default=0))
    if saved_step > 0:
        raise CheckpointError(
            f"{checkpoints.store.root}: no checkpoint found, but the run saved one at step {saved_step}: "
            "restore the folder, or restart with another run.name"
        )
    if checkpoints.is_needed:
        raise CheckpointError(
            f"{checkpoints.store.root}: no checkpoint found, but run.resume is 'must': set it to 'allow'"
        )
