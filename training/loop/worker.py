"""The training loop that every worker runs, whatever started it: build, restore, loop, finish.

In: the config, a store on disk, an initialised process group. Out: checkpoints, metrics.jsonl, an exported model and
the run's outcome, in the run's folder. An event on one worker (a signal, a damaged record) is shared before the next
step, so that all end after the same step.
"""

import json
import math
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from esmeray.cluster.collective import StepAgreement, WorkerContext
from esmeray.common.errors import EsmerayError
from esmeray.dataset.batches.steps import StepBatches
from esmeray.run_folder.checkpoints import Manifest, Position, installed_versions
from esmeray.run_folder.metrics_log import read_metrics
from esmeray.run_folder.mirror import RunMirror
from esmeray.run_folder.paths import Outcome, RunFolder, Status
from esmeray.tasks.plan import task_plan
from esmeray.training.checkpoints.writer import CheckpointWriter
from esmeray.training.config import Config
from esmeray.training.engine.step_clock import StepClock
from esmeray.training.engine.weight_check import WeightsDifferError, differing_weights
from esmeray.training.loop.building import Worker
from esmeray.training.loop.finishing import described, diverged, failed, finish, repeatable
from esmeray.training.loop.restoring import restore, rewind
from esmeray.training.loop.results import StepResults
from esmeray.training.loop.schedules import learning_rate, muon_momentum
from esmeray.training.loop.stepping import Stepper, every_step


def train_worker(config: Config, context: WorkerContext, store_path: str, wandb_run_id: str | None = None) -> Outcome:
    """Train to the end, to a request to stop or to a failure that would repeat; returns the outcome, also written.

    A process group exists and paths of the config are absolute. ``store_path`` is what the task's plan prepared.
    ``wandb_run_id`` is recorded in checkpoints. Raises where this worker can't continue; where trying again would fail
    again, the outcome is written first.
    """
    run = RunFolder(config.run.storage_path, config.run.name)
    mirror = RunMirror(run)
    try:
        if not Path(store_path).exists():  # another node's
            store_path = str(task_plan(config.data, config.model).prepare(run.stores))
        worker = Worker(config, context, run, store_path, wandb_run_id)
        try:
            position = restore(worker)
            if context.resized is not None:
                worker.log.event("resized", position.step, **context.resized)
            outcome = loop(worker, position)
            return finish(worker, outcome)
        except Exception as error:
            worker.leave(is_over=repeatable(error) is not None)
            raise
        finally:
            worker.leave(is_over=False)
            worker.mirror.close()
    except Exception as error:
        if (exit_code := repeatable(error)) is not None:
            run.write_outcome(Outcome("failed", -1, described(error), exit_code))
            mirror.save_files(run.outcome.name)
        raise


def loop(worker: Worker, position: Position) -> Outcome:
    """Step until the planned end, a request to stop or a failure that would repeat."""
    training, control, experiment = worker.config.training, worker.control, worker.experiment
    worker.step = position.step
    stopping = EarlyStopping(experiment.patience, _earlier_costs(worker, position))
    if position.step == 0:
        # The first point of every curve is the model as it starts.
        validate(worker, position)
    steps = every_step(experiment.batches, position)
    clock = StepClock(training.log_every_steps, worker.context.device)
    stepper = Stepper(worker.engine, control, clock, worker.guard, worker.watchdog.progress)
    # On CUDA a step's results are read while the next one computes: reading them at once would wait for the device.
    results = StepResults(worker, clock, late=worker.context.device.type == "cuda")
    while position.step < worker.total_steps:
        step, error = _next_step(steps, worker.writer)
        clock.loaded()
        # Before anything is computed: a worker that left now would keep the others waiting in a collective.
        with clock.phase("communication"):
            targets, tokens = (step.num_targets, step.num_tokens) if step else (0, 0)
            agreement = control.agree(targets, tokens, stop=worker.end_requested(), failed=error is not None)
        if agreement.failed or agreement.stop or step is None:
            # What was done is logged before the end: the outcome has to name the last step.
            position = results.log_all(position)
        if agreement.failed or step is None:
            return failed(worker.run, position, error)
        if agreement.stop:
            if position.step > worker.saved_step:
                save(worker, position, None)
            status: Status = "stopped" if worker.run.stop_requested() else "resizing"
            return Outcome(status, position.step, f"{status} at step {position.step}; the same command resumes it", 0)
        # The divisor is the targets of all workers, known before the pass: gradients then only have to be added up.
        sums = stepper.forward_backward(step, agreement.targets)
        rate = learning_rate(position.step, worker.total_steps, training)
        with clock.phase("optimizer"):
            result = worker.engine.step(rate, muon_momentum(position.step, training.muon))
        position = _advance(position, step, agreement)
        worker.step = position.step
        clock.stepped(agreement.tokens, step.num_tokens, len(step) * worker.config.batch.tokens)
        worker.watchdog.stepped()
        position = results.add(position, step.batches, sums, result, rate)
        if position.step_in_epoch == 0 and worker.sampler is not None:
            worker.sampler.new_epoch()
        validating, saving, copying, checking = _due(worker, position.step)
        if validating or saving or copying:
            # Their results say whether the steps were finite: after too many that were not, nothing is saved.
            position = results.log_all(position)
        if position.nonfinite_in_a_row >= training.max_nonfinite_steps:
            if not rewind(worker, position):
                return diverged(worker.run, position)
            position = position.model_copy(update={"nonfinite_in_a_row": 0})
            saving = True  # a worker that is lost later must not come to the same steps again
        # Before saving: the manifest of a checkpoint holds its cost.
        cost = validate(worker, position) if validating else None
        if cost is not None:
            stopping.note(cost)
        saving |= cost is not None and stopping.is_best and experiment.exports_best
        if saving or copying:
            with clock.phase("checkpoint"):
                save(worker, position, cost, on_disk=saving)
        elif checking:
            check_weights(worker)
        # After saving: what is exported then is a checkpoint.
        if stopping.is_over and position.step < worker.total_steps:
            waited = f"{experiment.patience} evaluations without a better one"
            return Outcome("finished", position.step, f"trained {position.step} steps, then {waited}", 0)
        clock.start()
    return Outcome("finished", position.step, f"trained {position.step} steps", 0)


def _due(worker: Worker, step: int) -> tuple[bool, bool, bool, bool]:
    """What follows a step: an evaluation, a checkpoint, a copy in memory, a comparison of the weights."""
    checkpoint, training = worker.config.checkpoint, worker.config.training
    last = step == worker.total_steps
    # Where the rate begins to decay a longer run may branch off.
    saving = step in (worker.total_steps, worker.branch_step) or step % checkpoint.every_steps == 0
    # A checkpoint is one of the best only if its loss is known.
    validating = last or step % training.evaluate_every_steps == 0 or (saving and checkpoint.keep_best > 0)
    copying = step % (checkpoint.memory_every_steps or step + 1) == 0
    return validating, saving, copying, step % (training.checksum_every_steps or step + 1) == 0


class EarlyStopping:
    """The cost of evaluations, lower being better (Prechelt 1998); over after ``patience`` of them without a lower one.

    ``costs`` are those of the evaluations so far, in order. ``is_best``: the last evaluation was the best one.
    """

    def __init__(self, patience: int | None, costs: Iterable[float] = ()) -> None:
        self._patience = patience
        self._best = math.inf
        self._since_best = 0
        self.is_best = False
        for cost in costs:
            self.note(cost)

    def note(self, cost: float) -> None:
        self.is_best = cost < self._best
        self._best = min(self._best, cost)
        self._since_best = 0 if self.is_best else self._since_best + 1

    @property
    def is_over(self) -> bool:
        return self._patience is not None and self._since_best >= self._patience


def _earlier_costs(worker: Worker, position: Position) -> list[float]:
    """Costs of the evaluations before this position, from rank 0's metrics.jsonl."""
    records = read_metrics(worker.run.metrics) if worker.context.rank == 0 and worker.run.metrics.exists() else []
    earlier = [r for r in records if r["kind"] == "validation" and 0 < r["step"] <= position.step]
    costs = [worker.experiment.cost(record) for record in earlier]
    known = [cost for cost in costs if cost is not None]
    return json.loads(worker.control.from_rank_0(json.dumps(known)))


def validate(worker: Worker, position: Position) -> float | None:
    """Evaluate on the held-out records; returns the cost that ranks checkpoints. Every worker calls it."""
    worker.watchdog.extend()
    metrics = worker.experiment.evaluate(worker.engine, worker.control, worker.stop_requested)
    # The guard compares steps: an evaluation has batches and memory of its own.
    worker.forget_peak()
    if not metrics:
        return None  # nothing is held out, or a stop was asked for
    worker.log.write("validation", position.step, epoch=position.epoch, **metrics)
    return worker.experiment.cost(metrics)


def check_weights(worker: Worker) -> None:
    """Raise WeightsDifferError where they do between the workers, and log it. Every worker calls it."""
    if worker.config.training.checksum_every_steps is None or worker.context.world_size == 1:
        return
    if problem := differing_weights(worker.engine.module, worker.control):
        worker.writer.wait()
        if worker.memory is not None:
            worker.memory.close()  # nobody compared the weights of these copies
        # At the checkpoint that training returns to: the log drops what comes after it.
        worker.log.event("weights_differ", worker.saved_step, message=f"at step {worker.step} {problem}")
        raise WeightsDifferError(problem)


def save(worker: Worker, position: Position, validation_cost: float | None, on_disk: bool = True) -> None:
    """Start writing the state: a checkpoint, reported to the launcher, and a copy in memory. Every worker calls it."""
    worker.watchdog.extend()
    check_weights(worker)
    rank, memory = worker.context.rank, worker.memory
    # Copied now, written in the background: the next step changes the weights in place.
    shards = worker.engine.copy_shards(with_model=memory is not None)
    manifest = _manifest(worker, position, validation_cost)
    if memory is not None and position.step < worker.total_steps:
        memory.write(shards, manifest, worker.control)
    if on_disk:
        shards = [(name, state) for name, state in shards if worker.engine.writes(name)]
        if rank == 0:
            shards += worker.experiment.names.items()
        worker.writer.write(shards, manifest)
        worker.saved_step = position.step
    worker.forget_peak()
    if on_disk:
        # Every worker, and after the same steps: Ray Train waits in its report for all of them.
        worker.context.report({"step": float(position.step)})


def _manifest(worker: Worker, position: Position, validation_cost: float | None) -> Manifest:
    return Manifest(
        position=position,
        world_size=worker.context.world_size,
        seed=worker.config.run.seed,
        store_checksum=worker.experiment.checksum,
        wandb_run_id=worker.wandb_run_id,
        validation_cost=validation_cost,
        config=worker.config.model_dump(mode="json"),
        versions=installed_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        files={},
    )


def _next_step(
    steps: Iterator[StepBatches], writer: CheckpointWriter
) -> tuple[StepBatches | None, EsmerayError | None]:
    """The next batches of this worker, or why there are none."""
    try:
        # A checkpoint that could not be written in the background ends the run at the next step, like damaged data.
        writer.check()
        return next(steps), None
    except EsmerayError as error:
        if error.retryable:
            # A fault of this machine: only a new process helps, and the launcher starts all of them again.
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
