"""The checkpoints of a run in its loop: saved in the background, restored at the start, and returned to by a rewind.

A run resumes from the newest intact checkpoint. A run that saved one never silently restarts from step 0. Every worker
makes the same calls.
"""

from collections.abc import Callable
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
from esmeray.training.loop.observing import Observers
from esmeray.training.loop.schedules import Course, course_of
from esmeray.training.section import TrainingSection

MAX_REWINDS = 3


@dataclass
class Checkpoints:
    """The checkpoints of a run, in its folder or at its URI, as one worker writes and reads them.

    Attributes:
        leads: this worker is the first of those that share its folder, and does the work that is done once per folder.
        template: the manifest of every checkpoint, without the values that depend on the step.
        names: files saved next to the shards; see :class:`~esmeray.tasks.experiment.Experiment`.
        report: reports a checkpoint to the launcher.
        is_needed: a run without a checkpoint is refused.
        course, batches: steps and batches of this attempt.
        saved_step: step of the newest checkpoint.
    """

    store: CheckpointStore
    mirror: RunMirror
    engine: TrainingEngine
    control: ControlGroup
    observers: Observers
    writer: CheckpointWriter
    leads: bool
    template: Manifest
    names: dict[str, bytes]
    report: Callable[[dict[str, float]], None]
    is_needed: bool
    course: Course
    batches: TrainingSteps
    saved_step: int = 0

    def save(self, position: Position, validation_cost: float | None) -> None:
        """Start writing a checkpoint."""
        self.observers.watchdog.extend()
        # Copied now, since the next step changes the weights in place; written in the background.
        shards = self.engine.copy_shards()
        created = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = self.template.model_copy(
            update={"position": position, "validation_cost": validation_cost, "created": created}
        )
        if self.control.rank == 0:
            shards += self.names.items()
        self.writer.write(shards, manifest)
        self.saved_step = position.step
        self.observers.forget_peak()
        # Every worker reports, after the same steps: Ray Train's report waits for all of them.
        self.report({"step": float(position.step)})

    def restore(self) -> Position:
        """Resume from the newest intact checkpoint, or start at step 0 if there is none."""
        store, log = self.store, self.observers.log
        if self.leads:
            store.root.mkdir(parents=True, exist_ok=True)
            store.sweep()
        self.control.all_true(True)  # readers wait until the leaders have swept
        folder, warnings = self.newest()
        if folder is None:
            self._refuse_to_begin_again()
            position = Position()
            log.rewind(-1)  # an attempt that saved nothing may have logged steps, which are repeated
        else:
            position = folder.manifest().position
            log.rewind(position.step)
            for warning in warnings:
                log.event("warning", position.step, message=warning)
            self.load(folder)
            self.control.all_true(True)  # renaming waits until all have read
            self.saved_step = position.step
            if self.leads:
                # Later checkpoints are from steps that are repeated, perhaps with other settings: two histories would
                # mix.
                store.discard_after(position.step)
                store.write_latest(folder)
            log.event(
                "resumed",
                position.step,
                checkpoint=folder.path.name,
                total_steps=self.course.total_steps,
                workers=self.control.world_size,
            )
        if self.leads:
            self.mirror.start(position.step)
        return position

    def rewind(self, training: TrainingSection, position: Position) -> bool:
        """Load weights and optimizer of the newest checkpoint before the steps that were not finite.

        Training continues at ``position``: the batches since that checkpoint are left out. Returns False if the run has
        to end: ``training.on_divergence`` is stop, there were :data:`MAX_REWINDS`, or there is no such checkpoint.
        """
        if training.on_divergence == "stop":
            return False
        self.observers.watchdog.extend()
        self.writer.wait()  # the newest checkpoint may be half-written
        # Counted in the log, which outlives the process, so that resuming does not add rewinds.
        records = self.observers.records()
        rewinds = self.control.from_rank_0(sum(record.get("event") == "rewound" for record in records))
        if rewinds >= MAX_REWINDS:
            return False
        try:
            folder, _ = self.newest(finite=True)
        except CheckpointError:
            folder = None
        if folder is None:
            return False
        self.load(folder)
        message = (
            f"loss or gradient was not finite in {position.nonfinite_in_a_row} steps in a row: weights and "
            f"optimizer are reset to step {folder.step}, and the batches since then are skipped (rewind "
            f"{rewinds + 1} of at most {MAX_REWINDS})"
        )
        self.observers.log.event("rewound", position.step, message=message)
        return True

    def newest(self, finite: bool = False) -> tuple[CheckpointFolder | None, list[str]]:
        """Find the newest intact checkpoint. Returns it, or None if the run never completed one, and warnings about
        newer ones.

        ``finite``: only checkpoints whose last step was finite. Every worker checks the files of its own rank, and a
        share of the files of ranks that no longer have a worker. Raises CheckpointError if there are checkpoints but
        none can be used.
        """
        warnings: list[str] = []
        # Use rank 0's list: other nodes may see an older state of a shared file system.
        names = self.control.from_rank_0([folder.path.name for folder in self.store.complete()])
        folders = [CheckpointFolder(self.store.root / name) for name in names]
        for folder in sorted(folders, key=lambda folder: folder.step, reverse=True):
            problem = self._problem_of(folder, finite)
            # All workers use the same checkpoint, so a part that is damaged on one worker rules it out for all.
            is_intact = self.control.all_true(not problem)
            self.observers.watchdog.extend()  # checking large files took long, and reading them may as well
            if is_intact:
                return folder, warnings
            reason = problem or "another worker's part is damaged"
            warnings.append(f"{folder.path.name} can't be used: {reason}")
        if warnings:
            raise CheckpointError(
                f"{self.store.root}: no usable checkpoint ({'; '.join(warnings)}): restore one from a copy, or "
                "restart with another run.name"
            )
        return None, []

    def load(self, folder: CheckpointFolder) -> None:
        self.engine.load_shards(self.mirror.fetched(folder))

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

    def _refuse_to_begin_again(self) -> None:
        """Raise CheckpointError at step 0 if the run saved a checkpoint before, or ``run.resume`` is ``must``."""
        records = self.observers.records()
        saved_steps = [record["step"] for record in records if record.get("event") == "checkpoint"]
        saved_step = self.control.from_rank_0(max(saved_steps, default=0))
        if saved_step > 0:
            raise CheckpointError(
                f"{self.store.root}: no checkpoint found, but the run saved one at step {saved_step}: restore "
                "the folder, or restart with another run.name"
            )
        if self.is_needed:
            raise CheckpointError(
                f"{self.store.root}: no checkpoint found, but run.resume is 'must': set it to 'allow'"
            )
