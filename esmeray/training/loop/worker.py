"""The training loop that every worker runs, however it was launched: build, restore, loop, finish.

Takes the config, a store on disk and an initialized process group. Writes checkpoints, metrics.jsonl, an exported model
and the run's outcome to the run's folder. An event on one worker (a signal, a damaged record) is shared before the next
step, so that all workers end after the same step.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from esmeray.cluster.collective import ControlGroup, StepAgreement, WorkerContext
from esmeray.common.errors import EsmerayError
from esmeray.dataset.batches.steps import StepBatches
from esmeray.run_folder.checkpoints import Position
from esmeray.run_folder.mirror import RunMirror
from esmeray.run_folder.paths import Outcome, RunFolder
from esmeray.tasks.experiment import Experiment
from esmeray.tasks.plan import task_plan
from esmeray.training.checkpoints.writer import CheckpointWriter
from esmeray.training.config import Config
from esmeray.training.engine.engine import TrainingEngine
from esmeray.training.engine.step_clock import StepClock
from esmeray.training.loop.building import Worker, build_worker
from esmeray.training.loop.checkpoints import restore, rewind
from esmeray.training.loop.finishing import described, diverged, failed, finish, repeatable, stopped
from esmeray.training.loop.observing import Observers, StepResults
from esmeray.training.loop.schedules import Course, learning_rate, muon_momentum
from esmeray.training.loop.stepping import Stepper, every_step
from esmeray.training.section import CheckpointSection, TrainingSection


def train_worker(config: Config, context: WorkerContext, store_path: str, wandb_run_id: str | None = None) -> Outcome:
    """Train until the end, a request to stop, or a failure that a retry would repeat. Returns and writes the outcome.

    A process group must exist, and paths of the config must be absolute. ``store_path`` is the data that the task's
    plan prepared. ``wandb_run_id`` is recorded in checkpoints. Raises if this worker can't continue. If a retry would
    fail again, the outcome is written first.
    """
    run = RunFolder(config.run.storage_path, config.run.name)
    mirror = RunMirror(run)
    try:
        if not Path(store_path).exists():  # prepared on another node
            store_path = str(task_plan(config.data, config.model).prepare(run.stores))
        worker = build_worker(config, context, run, store_path, wandb_run_id)
        try:
            return finish(worker, loop(worker, start(worker, context.resized)))
        except Exception as error:
            worker.leave(is_over=repeatable(error) is not None)
            raise
        finally:
            worker.leave(is_over=False)
            worker.checkpoints.mirror.close()
    except Exception as error:
        exit_code = repeatable(error)
        if exit_code is not None:
            run.write_outcome(Outcome("failed", -1, described(error), exit_code))
            mirror.save_files(run.outcome.name)
        raise


def start(worker: Worker, resized: dict[str, Any] | None = None) -> Position:
    """Resume from the newest checkpoint, or start at step 0, and log the circumstances."""
    position = restore(worker.checkpoints, worker.saver)
    observers, guard = worker.observers, worker.guard
    log, step = observers.log, position.step
    if step == 0:
        cropped = worker.experiment.cropped
        log.event(
            "started",
            0,
            total_steps=worker.course.total_steps,
            cropped_sequences=cropped.sequences,
            cropped_residues=cropped.residues,
        )
    if observers.hung is not None:
        message = f"started again, as there was no progress for too long; stacks of the workers: {observers.hung}"
        log.event("hung", step, message=message)
    if guard.restore(worker.control):
        message = f"out of memory before: every batch is taken in {guard.parts} parts ({worker.run.memory_guard})"
        log.event("memory_guard", step, parts=guard.parts, message=message)
    if resized is not None:
        log.event("resized", step, **resized)
    return position


def loop(worker: Worker, position: Position) -> Outcome:
    """Take steps until the planned end, a request to stop, or a failure that a retry would repeat."""
    experiment, engine, control = worker.experiment, worker.engine, worker.control
    observers, saver, course = worker.observers, worker.saver, worker.course
    training = worker.training
    observers.step = position.step
    costs = _earlier_costs(experiment, control, observers, position.step)
    if position.step == 0:
        # The first point of every curve is the untrained model.
        validate(experiment, engine, control, observers, position)
    steps = every_step(experiment.batches, position)
    clock = StepClock(training.log_every_steps, engine.device)
    stepper = Stepper(engine, control, clock, worker.guard, observers.watchdog.progress)
    # On CUDA a step's results are read during the next step, since reading them at once would wait for the device.
    results = StepResults(experiment, engine, control, observers, clock, late=engine.device.type == "cuda")
    while position.step < course.total_steps:
        step, error = _next_step(steps, saver.writer)
        clock.loaded()
        # Agree before computing: if one worker ended alone, the others would wait for it in a collective.
        with clock.phase("communication"):
            targets, tokens = (step.num_targets, step.num_tokens) if step else (0, 0)
            agreement = control.agree(targets, tokens, stop=observers.end_requested(), failed=error is not None)
        if agreement.failed or agreement.stop or step is None:
            # Log all results before the end: the outcome must name the last step.
            position = results.log_all(position)
        if agreement.failed or step is None:
            return failed(worker.run, position, error)
        if agreement.stop:
            if position.step > saver.saved_step:
                saver.save(position, None)
            return stopped(worker.run, position)
        # Divide by the number of targets of all workers, which is known before the pass: gradients are only summed.
        sums = stepper.forward_backward(step, agreement.targets)
        rate = learning_rate(position.step, course.total_steps, training)
        with clock.phase("optimizer"):
            result = engine.step(rate, muon_momentum(position.step, training.muon))
        position = _advance(position, step, agreement)
        observers.step = position.step
        clock.stepped(agreement.tokens, step.num_tokens, len(step) * experiment.settings.batch.tokens)
        observers.watchdog.stepped()
        position = results.add(position, step.batches, sums, result, rate)
        if position.step_in_epoch == 0 and observers.sampler is not None:
            observers.sampler.new_epoch()
        due = _due(position.step, course, training, worker.checkpoint)
        saves = due.checkpoint
        if due.evaluation or due.checkpoint or due.copy:
            # Read whether the steps were finite: after too many that were not, nothing is saved.
            position = results.log_all(position)
        if position.nonfinite_in_a_row >= training.max_nonfinite_steps:
            if not rewind(worker.checkpoints, saver, training, position):
                return diverged(worker.run, position)
            position = position.model_copy(update={"nonfinite_in_a_row": 0})
            saves = True  # after losing a worker, training must not return to the steps that diverged
        # Evaluate before saving: the checkpoint's manifest contains the cost.
        cost = validate(experiment, engine, control, observers, position) if due.evaluation else None
        if cost is not None:
            costs.append(cost)
            saves |= evaluations_since_best(costs) == 0 and experiment.exports_best
        if saves or due.copy:
            with clock.phase("checkpoint"):
                saver.save(position, cost, on_disk=saves)
        elif due.comparison:
            saver.check_weights()
        # After saving, since the export reads a checkpoint. Early stopping follows Prechelt (1998).
        is_over = experiment.patience is not None and evaluations_since_best(costs) >= experiment.patience
        if is_over and position.step < course.total_steps:
            waited = f"{experiment.patience} evaluations without a better one"
            return Outcome("finished", position.step, f"trained {position.step} steps, then {waited}", 0)
        clock.start()
    return Outcome("finished", position.step, f"trained {position.step} steps", 0)


class Due(NamedTuple):
    """Actions that follow a step."""

    evaluation: bool
    checkpoint: bool
    copy: bool
    """Copy of the state in memory."""
    comparison: bool
    """Comparison of the weights across workers."""


def _due(step: int, course: Course, training: TrainingSection, checkpoint: CheckpointSection) -> Due:
    is_last = step == course.total_steps
    # Save at the start of the decay: a longer run can branch off there.
    saving = is_last or step == course.branch_step or step % checkpoint.every_steps == 0
    # A checkpoint can only rank among the best if its loss is known.
    evaluating = is_last or step % training.evaluate_every_steps == 0 or (saving and checkpoint.keep_best > 0)
    return Due(
        evaluating,
        saving,
        _divides(checkpoint.memory_every_steps, step),
        _divides(training.checksum_every_steps, step),
    )


def _divides(every_steps: int | None, step: int) -> bool:
    return every_steps is not None and step % every_steps == 0


def evaluations_since_best(costs: list[float]) -> int:
    """Return the number of evaluations after the one with the lowest cost (the first one, if costs are equal)."""
    return len(costs) - 1 - costs.index(min(costs)) if costs else 0


def _earlier_costs(experiment: Experiment, control: ControlGroup, observers: Observers, until_step: int) -> list[float]:
    """Return the costs of the evaluations up to a step, so that resuming does not extend the patience."""
    evaluations = [record for record in observers.records() if record["kind"] == "validation"]
    # Without the evaluation of the untrained model, which any training improves on.
    costs = [experiment.cost(record) for record in evaluations if 0 < record["step"] <= until_step]
    return control.from_rank_0([cost for cost in costs if cost is not None])


def validate(
    experiment: Experiment, engine: TrainingEngine, control: ControlGroup, observers: Observers, position: Position
) -> float | None:
    """Evaluate on the held-out records. Returns the cost that ranks checkpoints. Every worker calls it."""
    observers.watchdog.extend()
    metrics = experiment.evaluate(engine, control, observers.stop_requested)
    # The guard compares memory peaks of steps; an evaluation has other batches.
    observers.forget_peak()
    if not metrics:
        return None  # nothing is held out, or a stop was requested
    observers.log.write("validation", position.step, epoch=position.epoch, **metrics)
    return experiment.cost(metrics)


def _next_step(
    steps: Iterator[StepBatches], writer: CheckpointWriter
) -> tuple[StepBatches | None, EsmerayError | None]:
    """Return the next batches of this worker, or the error that ends the run."""
    try:
        # A failed background write of a checkpoint ends the run at the next step, like damaged data.
        writer.check()
        return next(steps), None
    except EsmerayError as error:
        if error.retryable:
            # A fault of this machine: only a new process helps, and the launcher restarts all of them.
            raise
        return None, error


def _advance(position: Position, step: StepBatches, agreement: StepAgreement) -> Position:
    return position.model_copy(
        update={
            "step": position.step + 1,
            "epoch": step.next_epoch,
            "step_in_epoch": step.next_step,
            "tokens_seen": position.tokens_seen + agreement.tokens,
        }
    )
