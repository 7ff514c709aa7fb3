"""Restoring the newest intact checkpoint of a run; a run that saved one never starts from step 0 silently."""

from collections.abc import Iterable

from esmeray.common.errors import CheckpointError, DataError
from esmeray.run_folder.checkpoints import CheckpointFolder, Position
from esmeray.run_folder.metrics_log import read_metrics
from esmeray.training.config import Config
from esmeray.training.loop.building import Worker
from esmeray.training.loop.schedules import steps_before_decay


def restore(worker: Worker) -> Position:
    """Resume from the newest intact checkpoint; the start where there is none. Every worker calls it."""
    context, control, log = worker.context, worker.control, worker.log
    if worker.leads:
        worker.run.checkpoints.mkdir(parents=True, exist_ok=True)
        worker.checkpoints.sweep()
    control.all_true(True)  # nobody looks before it is swept
    # Those that every worker has a part of: a lost one took its own along.
    copies = worker.memory.common(control) if worker.memory is not None else []
    folder, warnings = _find_checkpoint(worker, copies)
    if folder is None:
        _refuse_to_begin_again(worker)
        position = Position()
        log.rewind(-1)  # an attempt that saved nothing may have logged steps, which come again
        cropped = worker.experiment.cropped
        log.event(
            "started",
            0,
            total_steps=worker.total_steps,
            cropped_sequences=cropped.sequences,
            cropped_residues=cropped.residues,
        )
    else:
        position = folder.manifest().position
        log.rewind(position.step)
        for warning in warnings:
            log.event("warning", position.step, message=warning)
        worker.engine.load_shards(worker.mirror.fetched(folder))
        control.all_true(True)  # nobody renames before everybody has read
        in_memory = folder.path.parent != worker.checkpoints.root
        # A copy in memory is no checkpoint: a worker that is lost takes it along.
        worker.saved_step = 0 if in_memory else position.step
        if worker.leads:
            # Later ones are of steps that are taken again, perhaps with other settings: two histories would mix.
            worker.checkpoints.discard_after(position.step - in_memory)
            if not in_memory:
                worker.checkpoints.write_latest(folder)
        log.event(
            "resumed",
            position.step,
            checkpoint=folder.path.name + " in memory" * in_memory,
            total_steps=worker.total_steps,
            workers=context.world_size,
        )
    if worker.leads:
        worker.mirror.start(position.step)
    if worker.memory is not None:
        worker.memory.discard_after(position.step)
    if worker.hung is not None:
        message = f"started again, as there was no progress for too long; stacks of the workers: {worker.hung}"
        log.event("hung", position.step, message=message)
    if worker.guard is not None and worker.guard.restore(control):
        parts = worker.guard.parts
        message = f"out of memory before: every batch is taken in {parts} parts ({worker.run.memory_guard})"
        log.event("memory_guard", position.step, parts=parts, message=message)
    return position


def rewind(worker: Worker, position: Position) -> bool:
    """Load weights and optimizer of the newest checkpoint from before the steps that were not finite.

    Training continues at ``position``: the batches since that checkpoint are left out. False where it has to end:
    by ``training.on_divergence``, after as many rewinds as may be, or without such a checkpoint. Every worker calls it.
    """
    training, control = worker.config.training, worker.control
    if training.on_divergence == "stop":
        return False
    worker.watchdog.extend()
    worker.writer.wait()  # the newest checkpoint may be half-written
    # Counted in the log, which outlives the process: a run that is resumed has as many tries as one that was not.
    records = read_metrics(worker.run.metrics) if worker.context.rank == 0 else []
    rewinds = int(control.from_rank_0(str(sum(record.get("event") == "rewound" for record in records))))
    if rewinds >= training.max_rewinds:
        return False
    try:
        folder, _ = _find_checkpoint(worker, finite=True)
    except CheckpointError:
        folder = None
    if folder is None:
        return False
    worker.engine.load_shards(worker.mirror.fetched(folder))
    message = (
        f"loss or gradient was not finite in {position.nonfinite_in_a_row} steps in a row: weights and optimizer are "
        f"again those of step {folder.step}, the batches since then are left out (rewind {rewinds + 1} of at most "
        f"{training.max_rewinds})"
    )
    worker.log.event("rewound", position.step, message=message)
    return True


def _decayed_otherwise(worker: Worker, folder: CheckpointFolder) -> bool:
    """Test for a checkpoint of wsd's decay, where training has been given another end, or decay, since then."""
    if worker.branch_step is None:
        return False
    earlier = folder.settings(Config).training
    total_steps = earlier.max_steps or worker.experiment.batches.total_steps(earlier.epochs)
    branch_step = steps_before_decay(total_steps, earlier)
    # Weights whose rate has decayed would be trained at the full rate again: from before it, the run can be prolonged.
    has_decayed = earlier.schedule == "wsd" and folder.step > branch_step
    return has_decayed and (branch_step, total_steps) != (worker.branch_step, worker.total_steps)


def _refuse_to_begin_again(worker: Worker) -> None:
    """Refuse step 0 for a run that saved a checkpoint once, or where ``run.resume`` is ``must``."""
    metrics = worker.run.metrics
    records = read_metrics(metrics) if worker.context.rank == 0 and metrics.exists() else []
    last = max((r["step"] for r in records if r.get("event") == "checkpoint"), default=0)
    if (saved := int(worker.control.from_rank_0(str(last)))) > 0:
        raise CheckpointError(
            f"{worker.run.checkpoints}: there is no checkpoint, but the run saved one at step {saved}: "
            "restore the folder, or start anew under another run.name"
        )
    if worker.config.run.resume == "must":
        raise CheckpointError(
            f"{worker.run.checkpoints}: there is no checkpoint, and run.resume is 'must': set it to 'allow'"
        )


def _find_checkpoint(
    worker: Worker, copies: Iterable[CheckpointFolder] = (), finite: bool = False
) -> tuple[CheckpointFolder | None, list[str]]:
    """The newest intact checkpoint, and warnings about newer ones; None where the run never completed one.

    ``copies`` in memory count as well; ``finite``: of those whose last step was so. Every worker checks the files of
    its own rank, and a share of those of ranks that have no worker any more. Raises CheckpointError where there are
    checkpoints on disk and none can be used.
    """
    warnings: list[str] = []
    store, control = worker.checkpoints, worker.control
    names = control.from_rank_0("\n".join(folder.path.name for folder in store.complete())).split("\n")
    on_disk = [CheckpointFolder(store.root / name) for name in filter(None, names)]
    for folder in sorted([*on_disk, *copies], key=lambda folder: folder.step, reverse=True):
        problem = ""
        try:
            place, whole = worker.context, worker.mirror.fetched(folder)
            manifest = whole.verify(range(place.rank, whole.manifest().world_size, place.world_size))
            if finite and manifest.position.nonfinite_in_a_row:
                problem = "its last step was not finite"
            elif _decayed_otherwise(worker, whole):
                problem = "its learning rate had begun to decay for an earlier end of training"
        except (CheckpointError, DataError) as error:
            problem = str(error)
        # All take the same one: a part that is damaged on one worker is of no use to the others.
        is_intact = control.all_true(not problem)
        worker.watchdog.extend()  # checking large files took long, and so may reading them
        if is_intact:
            return folder, warnings
        if folder in on_disk:
            reason = problem or "another worker found its part of it damaged"
            warnings.append(f"{folder.path.name} can't be used: {reason}")
    if warnings:
        raise CheckpointError(
            f"{store.root}: no checkpoint can be used ({'; '.join(warnings)}): "
            "restore one from a copy, or start anew under another run.name"
        )
    return None, []
