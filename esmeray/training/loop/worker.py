"""The training loop that every worker runs, however it was launched: build, restore, loop, finish.

Takes the config, a store on disk and an initialized process group. Writes checkpoints, metrics.jsonl, an exported model
and the run's outcome to the run's folder. An event on one worker (a signal, a damaged record) is shared before the next
step, so that all workers end after the same step.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from esmeray.cluster.collective import WorkerContext
from esmeray.common.errors import EsmerayError
from esmeray.dataset.batches.steps import StepBatches
from esmeray.run_folder.checkpoints import Position
from esmeray.run_folder.mirror import RunMirror
from esmeray.run_folder.paths import Outcome, RunFolder
from esmeray.tasks.plan import task_plan
from esmeray.training.checkpoints.writer import CheckpointWriter
from esmeray.training.config import Config
from esmeray.training.engine.step_clock import StepClock
from esmeray.training.loop.building import Worker, build_worker
from esmeray.training.loop.finishing import described, diverged, failed, finish, repeatable, stopped
from esmeray.training.loop.observing import StepResults
from esmeray.training.loop.schedules import learning_rate, muon_momentum
from esmeray.training.loop.stepping import Stepper, every_step

MAX_NONFINITE_STEPS = 5
"""Consecutive steps that are not finite after which training counts as diverged."""


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
        finally:
            worker.observers.close()
            worker.checkpoints.mirror.close()
    except Exception as error:
        exit_code = repeatable(error)
        if exit_code is not None:
            run.write_outcome(Outcome("failed", -1, described(error), exit_code))
            mirror.save_files(run.outcome.name)
        raise


def start(worker: Worker, resized: dict[str, Any] | None = None) -> Position:
    """Resume from the newest checkpoint, or start at step 0, and log the circumstances."""
    position = worker.checkpoints.restore()
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
        message = f"restarted after too long without progress; stack traces of the workers: {observers.hung}"
        log.event("hung", step, message=message)
    if guard.restore(worker.control):
        message = (
            f"out of memory in an earlier attempt: every batch is split into {guard.parts} micro-batches "
            f"({worker.run.memory_guard})"
        )
        log.event("memory_guard", step, parts=guard.parts, message=message)
    if resized is not None:
        log.event("resized", step, **resized)
    observers.step = step
    return position


def loop(worker: Worker, position: Position) -> Outcome:
    """Take steps until the planned end, a request to stop, or a failure that a retry would repeat."""
    engine, control, observers, checkpoints = worker.engine, worker.control, worker.observers, worker.checkpoints
    training, total_steps = worker.training, worker.course.total_steps
    costs = _earlier_costs(worker, position.step)
    if position.step == 0:
        validate(worker, position)  # the first point of every curve is the untrained model
    clock = StepClock(engine.device)
    stepper = Stepper(engine, control, clock, worker.guard, observers.watchdog.progress)
    # On CUDA a step's results are read during the next step, since reading them at once would wait for the device.
    results = StepResults(worker.experiment, engine, control, observers, clock, late=engine.device.type == "cuda")
    steps = every_step(worker.experiment.batches, position)
    while position.step < total_steps:
        step, error = _next_step(steps, checkpoints.writer)
        clock.loaded()
        # Agree before computing: if one worker ended alone, the others would wait for it in a collective.
        with clock.phase("communication"):
            targets, tokens = (step.num_targets, step.num_tokens) if step else (0, 0)
            agreement = control.agree(targets, tokens, stop=observers.end_requested(), failed=error is not None)
        # Log all results before the end: the outcome must name the last step.
        if agreement.failed or step is None:
            return failed(worker.run, results.log_all(position), error)
        if agreement.stop:
            return stopped(checkpoints, worker.run, results.log_all(position))
        # Divide by the number of targets of all workers, which is known before the pass: gradients are only summed.
        sums = stepper.forward_backward(step, agreement.targets)
        rate = learning_rate(position.step, total_steps, training)
        with clock.phase("optimizer"):
            result = engine.step(rate, muon_momentum(position.step))
        position = position.model_copy(
            update={
                "step": position.step + 1,
                "epoch": step.next_epoch,
                "step_in_epoch": step.next_step,
                "tokens_seen": position.tokens_seen + agreement.tokens,
            }
        )
        observers.step = position.step
        clock.stepped(agreement.tokens, step.num_tokens, len(step) * worker.experiment.settings.batch.tokens)
        observers.watchdog.stepped()
        position = results.add(position, step.batches, sums, result, rate)
        position, outcome = after_step(worker, results, clock, costs, position)
        if outcome is not None:
            return outcome
        clock.start()
    return Outcome("finished", position.step, f"trained {position.step} steps", 0)


def after_step(
    worker: Worker, results: StepResults, clock: StepClock, costs: list[float], position: Position
) -> tuple[Position, Outcome | None]:
    """Evaluate, save and stop, as they are due after a step. Every worker makes the same calls.

    ``costs``: costs of the evaluations so far. Returns the position, with the results read so far, and the outcome if
    the run ends here.
    """
    experiment, step = worker.experiment, position.step
    if position.step_in_epoch == 0 and worker.observers.sampler is not None:
        worker.observers.sampler.new_epoch()
    is_last = step == worker.course.total_steps
    # Save at the start of the decay: a longer run can branch off there.
    saves = is_last or step == worker.course.branch_step or step % worker.checkpoint.every_steps == 0
    # A checkpoint can only rank among the best if its loss is known.
    evaluates = saves or step % worker.training.evaluate_every_steps == 0
    if evaluates:
        # Read whether the steps were finite: after too many that were not, nothing is saved.
        position = results.log_all(position)
    if position.nonfinite_in_a_row >= MAX_NONFINITE_STEPS:
        if not worker.checkpoints.rewind(worker.training, position):
            return position, diverged(worker.run, position)
        position = position.model_copy(update={"nonfinite_in_a_row": 0})
        saves = True  # after losing a worker, training must not return to the steps that diverged
    # Evaluate before saving: the checkpoint's manifest contains the cost.
    cost = validate(worker, position) if evaluates else None
    if cost is not None:
        costs.append(cost)
        saves |= evaluations_since_best(costs) == 0 and experiment.exports_best
    if saves:
        with clock.phase("checkpoint"):
            worker.checkpoints.save(position, cost)
    # After saving, since the export reads a checkpoint. Early stopping follows Prechelt (1998).
    is_over = experiment.patience is not None and evaluations_since_best(costs) >= experiment.patience
    if is_over and not is_last:
        waited = f"stopped early after {experiment.patience} evaluations without improvement"
        return position, Outcome("finished", step, f"trained {step} steps, then {waited}", 0)
    return position, None


def evaluations_since_best(costs: list[float]) -> int:
    """Return the number of evaluations after the one with the lowest cost (the first one, if costs are equal)."""
    return len(costs) - 1 - costs.index(min(costs)) if costs else 0


def _earlier_costs(worker: Worker, until_step: int) -> list[float]:
    """Return the costs of the evaluations up to a step, so that resuming does not extend the patience."""
    evaluations = [record for record in worker.observers.records() if record["kind"] == "validation"]
    # Without the evaluation of the untrained model, which any training improves on.
    costs = [worker.experiment.cost(record) for record in evaluations if 0 < record["step"] <= until_step]
    return worker.control.from_rank_0([cost for cost in costs if cost is not None])


def validate(worker: Worker, position: Position) -> float | None:
    """Evaluate on the held-out records. Returns the cost that ranks checkpoints. Every worker calls it."""
    observers = worker.observers
    observers.watchdog.extend()
    metrics = worker.experiment.evaluate(worker.engine, worker.control, observers.stop_requested)
    # The guard compares memory peaks of steps; an evaluation has other batches.
    observers.forget_peak()
    if not metrics:
        return None  # nothing is held out, or a stop was requested
    observers.log.write("validation", position.step, epoch=position.epoch, **metrics)
    return worker.experiment.cost(metrics)


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
