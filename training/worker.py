"""The training loop that every worker runs, whatever started it: build, restore, loop, finish.

In: the config, a store on disk, an initialised process group. Out: checkpoints, metrics.jsonl, an exported model and
the run's outcome, in the run's folder. What happens alike on every worker needs no agreement; what happens on one (a
signal, a damaged record) is told to all before the next step, so that all end after the same step.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from dataset.packing import micro_batches
from dataset.steps import StepBatches, TrainingSteps
from model.flops import training_flops_per_token
from model.parameter_groups import parameter_groups
from monitoring.metrics_log import read_metrics
from monitoring.sampler import Sampler
from train_config.errors import CheckpointError, DivergenceError, EsmerayError, ResourceError
from train_config.schema import Config
from training.checkpoint import CheckpointFolder, CheckpointStore, Manifest, Position, best
from training.checkpoint_writer import CheckpointWriter
from training.collective import ControlGroup, StepAgreement
from training.context import WorkerContext
from training.device import apply_device_settings
from training.early_stopping import EarlyStopping
from training.engine import StepResult, TrainingEngine
from training.experiment import Experiment, open_experiment
from training.finishing import export_final, save_nonfinite_records
from training.memory_guard import REMEDY, MemoryGuard
from training.memory_meter import MemoryMeter, is_out_of_memory
from training.restoring import find_checkpoint, random_states, restore_random_states
from training.run_folder import Outcome, RunFolder
from training.run_log import RunLog
from training.schedule import learning_rate
from training.step_clock import StepClock
from training.stepping import Stepper
from training.versions import installed_versions

logger = logging.getLogger(__name__)


@dataclass
class Worker:
    """Everything that one worker holds during training."""

    config: Config
    context: WorkerContext
    run: RunFolder
    log: RunLog
    control: ControlGroup
    engine: TrainingEngine
    experiment: Experiment
    checkpoints: CheckpointStore
    writer: CheckpointWriter
    wandb_run_id: str | None
    total_steps: int
    guard: MemoryGuard | None = None
    sampler: Sampler | None = None
    step: int = 0

    def stop_requested(self) -> bool:
        """Whether the driver asked for an end; worker 0 looks, the others hear of it."""
        return self.context.rank == 0 and self.run.stop_requested()

    def warn(self, message: str) -> None:
        """Tell a person, once the driver reads it; from any thread."""
        logger.warning("worker %d: %s", self.context.rank, message)
        self.log.event("warning", self.step, message=message)

    def forget_peak(self) -> None:
        """What an evaluation or a checkpoint took on the CPU says nothing about a step."""
        if self.guard is not None:
            self.guard.forget_peak()

    def stop_sampling(self) -> None:
        """Take a last sample. May be called again."""
        if self.sampler is not None:
            self.sampler.close()


def train_worker(config: Config, context: WorkerContext, store_path: str, wandb_run_id: str | None = None) -> Outcome:
    """Train to the end, to a request to stop or to a failure that would repeat.

    Args:
        config: the resolved config; ``run.storage_path`` is absolute.
        context: rank and device; a process group exists.
        store_path: the LMDB store, on a disk of this node; for the classifier the labelled store.
        wandb_run_id: recorded in checkpoints.

    Returns:
        How it ended, also written to the run's folder.

    Raises:
        EsmerayError: this worker can't go on; the others are told, or lose it.
        Exception: something broke. Where it would break again, the outcome says so and trying again ends at once.
    """
    run = RunFolder(config.run.storage_path, config.run.name)
    if (earlier := run.read_outcome()) is not None:
        return earlier  # a failure that would repeat: the launcher tried again all the same
    try:
        worker = build(config, context, run, store_path, wandb_run_id)
        try:
            position = restore(worker)
            outcome = loop(worker, position)
            return finish(worker, outcome)
        finally:
            worker.stop_sampling()
    except Exception as error:
        if (exit_code := repeatable(error)) is not None:
            run.write_outcome(Outcome("failed", -1, _described(error), exit_code))
        raise


def build(config: Config, context: WorkerContext, run: RunFolder, store_path: str, wandb_run_id: str | None) -> Worker:
    """Data, model and engine, before any step."""
    torch.manual_seed(config.run.seed + context.rank)
    apply_device_settings(config.training)
    control = ControlGroup()
    experiment = open_experiment(config, context, run, store_path)
    model = experiment.build_model()
    experiment.open(model, context, control)
    checkpoints = CheckpointStore(run.checkpoints)
    starts_anew = not control.from_rank_0("\n".join(folder.path.name for folder in checkpoints.complete()))
    if starts_anew:
        experiment.prepare(model, context, control)
    if config.training.compile:
        model.compile(dynamic=True)
    flops_per_token = training_flops_per_token(
        model, experiment.batches.mean_context, runs_backbone=experiment.feature_cache_hit_rate is None
    )
    groups = parameter_groups(model, config.training.weight_decay, experiment.rate_shares(model))
    engine = TrainingEngine(model, groups, config.training, config.deepspeed, context.device)
    log = RunLog(run.metrics, context.rank)
    writer = CheckpointWriter(
        checkpoints,
        context.rank,
        context.world_size,
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        asynchronous=config.checkpoint.asynchronous,
        on_complete=lambda folder: log.event("checkpoint", folder.step, checkpoint=folder.path.name),
    )
    worker = Worker(
        config=config,
        context=context,
        run=run,
        log=log,
        control=control,
        engine=engine,
        experiment=experiment,
        checkpoints=checkpoints,
        writer=writer,
        wandb_run_id=wandb_run_id,
        total_steps=config.training.max_steps or experiment.batches.total_steps(config.training.epochs),
    )
    worker.guard = _make_guard(worker)
    if config.training.gpu_log_interval > 0:
        worker.sampler = _start_sampler(worker, flops_per_token)
    return worker


def _make_guard(worker: Worker) -> MemoryGuard | None:
    training = worker.config.training
    section, limit_mib = training.memory_guard, training.cpu_memory_limit_mib
    if not section.enabled:
        if limit_mib is None:
            return None
        section = section.model_copy(update={"max_halvings": 0})  # the limit is to end the run
    limit_bytes = None if limit_mib is None else int(limit_mib * 2**20)
    return MemoryGuard(
        section,
        MemoryMeter(worker.context.device, limit_bytes),
        worker.run.memory_guard,
        tell=lambda message, parts: worker.log.event("memory_guard", worker.step, parts=parts, message=message),
        limited=limit_bytes is not None,
    )


def _start_sampler(worker: Worker, flops_per_token: float) -> Sampler:
    config, context = worker.config, worker.context
    return Sampler(
        worker.run.monitoring / f"worker-{context.rank:05d}.jsonl",
        worker=context.rank,
        device=context.device,
        node=context.local_rank == 0,
        interval_s=config.training.gpu_log_interval,
        prometheus=config.monitoring.prometheus,
        warn=worker.warn,
        flops_per_token=flops_per_token,
        peak_tflops=config.monitoring.peak_tflops,
        amp_dtype=config.training.amp_dtype,
        tf32=config.training.tf32,
        world_size=context.world_size,
    ).start()


def restore(worker: Worker) -> Position:
    """Go on from the newest checkpoint that holds; the start where there is none."""
    rank, control = worker.context.rank, worker.control
    if rank == 0:
        worker.run.checkpoints.mkdir(parents=True, exist_ok=True)
        worker.checkpoints.sweep()
    control.all_true(True)  # nobody looks before rank 0 has swept
    found = find_checkpoint(worker.checkpoints, rank, worker.context.world_size, worker.experiment.checksum, control)
    if found is None:
        _refuse_to_begin_again(worker)
    position = found.manifest.position if found else Position()
    worker.log.rewind(position.step if found else -1)
    for warning in found.warnings if found else []:
        worker.log.event("warning", position.step, message=warning)
    if found:
        worker.engine.load_shards(found.folder.path)
        restore_random_states(found.folder.path / _rng_file(rank))
        control.all_true(True)  # nobody renames before everybody has read
        if rank == 0:
            worker.checkpoints.discard_after(position.step)
        worker.log.event("resumed", position.step, checkpoint=found.folder.path.name, total_steps=worker.total_steps)
    else:
        cropped = worker.experiment.cropped
        worker.log.event(
            "started",
            0,
            total_steps=worker.total_steps,
            cropped_sequences=cropped.sequences,
            cropped_residues=cropped.residues,
        )
    if worker.guard is not None and worker.guard.restore(control):
        message = (
            f"memory ran out before: every batch is taken in {worker.guard.parts} parts ({worker.run.memory_guard})"
        )
        worker.log.event("memory_guard", position.step, parts=worker.guard.parts, message=message)
    return position


def _refuse_to_begin_again(worker: Worker) -> None:
    """Step 0 is for runs that never saved anything; a folder of checkpoints that is gone is told.

    Raises:
        CheckpointError: the run saved a checkpoint once, or ``run.resume`` is ``must``.
    """
    saved = worker.control.from_rank_0(str(_last_saved_step(worker.run)) if worker.context.rank == 0 else "")
    if int(saved) > 0 or worker.config.run.resume == "must":
        raise CheckpointError(
            f"{worker.run.checkpoints}: there is no checkpoint, but the run saved one at step {saved}: "
            "restore the folder, or start anew under another run.name"
            if int(saved) > 0
            else f"{worker.run.checkpoints}: there is no checkpoint, and run.resume is 'must': set it to 'allow'"
        )


def _last_saved_step(run: RunFolder) -> int:
    if not run.metrics.exists():
        return 0
    return max((r["step"] for r in read_metrics(run.metrics) if r.get("event") == "checkpoint"), default=0)


def loop(worker: Worker, position: Position) -> Outcome:
    """Step until the planned end, a request to stop or a failure that would repeat."""
    config, engine, control = worker.config, worker.engine, worker.control
    worker.step = saved_step = position.step
    stopping = EarlyStopping(worker.experiment.patience, _earlier_costs(worker, position))
    if position.step == 0:
        validate(worker, position)  # where it starts from
    steps = _steps_from(worker.experiment.batches, position, worker.total_steps)
    clock = StepClock(config.training.log_every_steps, engine.device, _budget_tokens(worker))
    stepper = Stepper(engine, control, clock, worker.guard)
    while position.step < worker.total_steps:
        step, error = _next_step(steps, worker.writer)
        clock.loaded()
        with clock.phase("communication"):
            agreement = _agree(worker, step, error)
        if agreement.failed or step is None:
            return _failed(worker, position, error)
        if agreement.stop:
            if position.step > saved_step:
                save(worker, position, None)
            return Outcome("stopped", position.step, f"stopped at step {position.step}; the same command goes on", 0)
        sums = stepper.forward_backward(step, agreement.targets)
        rate = learning_rate(position.step, worker.total_steps, config.training)
        result = stepper.update(rate)
        totals = sums.over_workers(control) if result.skipped or clock.log_due(position.step) else None
        nonfinite = result.skipped and _is_fault(worker, result, totals or {})
        if nonfinite:
            name_of = worker.experiment.record_name
            save_nonfinite_records(worker.run, name_of, position.step, worker.context.rank, step.batches)
        position = _advance(position, step, agreement, result.skipped, nonfinite)
        worker.step = position.step
        clock.stepped(agreement.tokens, step.num_tokens)
        if totals is not None:
            _log_step(worker, position, totals, result, rate, clock)
        if position.step_in_epoch == 0 and worker.sampler is not None:
            worker.sampler.new_epoch()
        if position.nonfinite_in_a_row >= config.training.max_nonfinite_steps:
            return _diverged(worker, position)
        last = position.step == worker.total_steps
        saving = last or position.step % config.checkpoint.every_steps == 0
        # A checkpoint is one of the best only if its loss is known.
        validating = position.step % config.training.evaluate_every_steps == 0 or (
            saving and config.checkpoint.keep_best
        )
        cost = validate(worker, position) if last or validating else None
        if cost is not None:
            stopping.note(cost)
        keeping = cost is not None and stopping.is_best and worker.experiment.exports_best
        if saving or keeping:
            with clock.phase("checkpoint"):
                save(worker, position, cost)
            saved_step = position.step
        if stopping.is_over and not last:
            waited = f"{worker.experiment.patience} evaluations without a better one"
            return Outcome("finished", position.step, f"trained {position.step} steps, then {waited}", 0)
        clock.start()
    return Outcome("finished", position.step, f"trained {position.step} steps", 0)


def finish(worker: Worker, outcome: Outcome) -> Outcome:
    """Wait for the last checkpoint, export the model, leave word of how it ended."""
    if outcome.status != "failed":
        worker.writer.wait()
    if outcome.status == "finished":
        step = _load_best(worker) if worker.experiment.exports_best else outcome.step
        export_final(worker.engine, worker.config, worker.run, worker.context.rank, step)
    worker.control.all_true(True)  # every shard is on disk
    if worker.context.rank == 0 and worker.run.read_outcome() is None:
        worker.log.event(outcome.status, max(outcome.step, 0), message=outcome.message)
        worker.run.write_outcome(outcome)
    worker.stop_sampling()
    worker.log.close()
    worker.experiment.close()
    worker.engine.close()
    return outcome


def _load_best(worker: Worker) -> int:
    """Go back to the best checkpoint; returns its step. Every worker calls it."""
    folder = best(worker.checkpoints) if worker.context.rank == 0 else None
    name = worker.control.from_rank_0("" if folder is None else folder.path.name)
    chosen = CheckpointFolder(worker.checkpoints.root / name)
    worker.engine.load_shards(chosen.path)
    worker.log.event("exports_best", chosen.step, checkpoint=name)
    return chosen.step


def _earlier_costs(worker: Worker, position: Position) -> list[float]:
    """Costs of the evaluations before this position, as rank 0 wrote them down."""
    records = read_metrics(worker.run.metrics) if worker.context.rank == 0 and worker.run.metrics.exists() else []
    figures = [r for r in records if r["kind"] == "validation" and 0 < r["step"] <= position.step]
    costs = [cost for f in figures if (cost := worker.experiment.cost(f)) is not None]
    return json.loads(worker.control.from_rank_0(json.dumps(costs)))


def validate(worker: Worker, position: Position) -> float | None:
    """Evaluate on the held-out records; returns the cost that ranks checkpoints. Every worker calls it."""
    figures = worker.experiment.evaluate(worker.engine, worker.control, worker.stop_requested)
    worker.forget_peak()
    if not figures:
        return None  # nothing is held out, or a stop was asked for
    worker.log.write("validation", position.step, epoch=position.epoch, **figures)
    return worker.experiment.cost(figures)


def save(worker: Worker, position: Position, validation_cost: float | None) -> None:
    """Start writing a checkpoint and report to the launcher. Every worker calls it."""
    rank, config = worker.context.rank, worker.config
    shards = [*worker.engine.copy_shards(), (_rng_file(rank), random_states())]
    manifest = Manifest(
        position=position,
        world_size=worker.context.world_size,
        seed=config.run.seed,
        store_checksum=worker.experiment.checksum,
        wandb_run_id=worker.wandb_run_id,
        validation_cost=validation_cost,
        config=config.model_dump(mode="json"),
        versions=installed_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        files={},
    )
    worker.writer.write(shards, manifest)
    worker.forget_peak()
    metrics = {"step": float(position.step), "tokens_seen": float(position.tokens_seen)}
    worker.context.report(metrics | ({} if validation_cost is None else {"validation_cost": validation_cost}))


def _steps_from(batches: TrainingSteps, position: Position, total_steps: int) -> Iterator[StepBatches]:
    """Every step from this position on, epoch after epoch."""
    epoch, step_in_epoch = position.epoch, position.step_in_epoch
    while True:
        yield from batches.epoch(epoch, step_in_epoch)
        epoch, step_in_epoch = epoch + 1, 0


def _next_step(
    steps: Iterator[StepBatches], writer: CheckpointWriter
) -> tuple[StepBatches | None, EsmerayError | None]:
    """The next batches of this worker, or why there are none."""
    try:
        writer.check()
        return next(steps), None
    except EsmerayError as error:
        if error.retryable:
            raise
        return None, error


def _agree(worker: Worker, step: StepBatches | None, error: EsmerayError | None) -> StepAgreement:
    stop = worker.stop_requested()
    if step is None:
        return worker.control.agree(0, 0, stop=stop, failed=error is not None)
    return worker.control.agree(step.num_targets, step.num_tokens, stop=stop, failed=False)


def _budget_tokens(worker: Worker) -> int:
    """Tokens that this worker's batches of a step have room for."""
    batch = worker.config.batch
    return batch.tokens * micro_batches(batch.batches_per_step, worker.context.world_size)


def _advance(
    position: Position, step: StepBatches, agreement: StepAgreement, skipped: bool, nonfinite: bool
) -> Position:
    return Position(
        step=position.step + 1,
        epoch=step.next_epoch,
        step_in_epoch=step.next_step,
        tokens_seen=position.tokens_seen + agreement.tokens,
        skipped_steps=position.skipped_steps + int(skipped),
        nonfinite_in_a_row=position.nonfinite_in_a_row + 1 if nonfinite else 0,
    )


def _is_fault(worker: Worker, result: StepResult, totals: dict[str, torch.Tensor]) -> bool:
    """Whether a skipped step is a fault: with fp16, a loss scale still on its way down is none."""
    if worker.config.training.amp_dtype != "fp16" or result.loss_scale_exhausted:
        return True
    return not math.isfinite(float(totals["loss"]))


def _log_step(
    worker: Worker,
    position: Position,
    totals: dict[str, torch.Tensor],
    result: StepResult,
    rate: float,
    clock: StepClock,
) -> None:
    figures, times = _figures(worker, totals), clock.read()
    if worker.sampler is not None:
        worker.sampler.note(position.step, position.epoch, {**figures, **times, **_loader_figures(worker.experiment)})
    worker.log.write(
        "train",
        position.step,
        epoch=position.epoch,
        **figures,
        learning_rate=rate,
        gradient_norm=result.gradient_norm,
        skipped=result.skipped,
        skipped_steps=position.skipped_steps,
        tokens_seen=position.tokens_seen,
        **times,
    )
    if result.skipped:
        worker.log.event("nonfinite" if position.nonfinite_in_a_row else "loss_scale_lowered", position.step)


def _loader_figures(experiment: Experiment) -> dict[str, float]:
    figures = {
        "loader_queue_depth": experiment.batches.queue_depth,
        "feature_cache_hit_rate": experiment.feature_cache_hit_rate,
    }
    return {name: float(value) for name, value in figures.items() if value is not None}


def _figures(worker: Worker, totals: dict[str, torch.Tensor]) -> dict[str, float]:
    return worker.engine.module.figures(totals)  # type: ignore[operator]


def repeatable(error: Exception) -> int | None:
    """The exit code of a failure that trying again would repeat; None for what a machine did.

    A lost peer shows as a RuntimeError of the collective or an error of Ray's, a failing disk or network as OSError:
    those are worth another try. So is an EsmerayError that says so. Everything else would only happen again.
    """
    if isinstance(error, EsmerayError):
        return None if error.retryable else error.exit_code
    if is_out_of_memory(error):
        return ResourceError.exit_code
    if isinstance(error, OSError):
        return EsmerayError.exit_code if isinstance(error, FileNotFoundError | PermissionError) else None
    lost_peer = isinstance(error, RuntimeError) and _LOST_PEER.search(str(error))
    from_launcher = type(error).__module__.partition(".")[0] == "ray"
    return None if lost_peer or from_launcher else EsmerayError.exit_code


_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed? ?out|broken pipe|store", re.IGNORECASE)


def _described(error: Exception) -> str:
    if isinstance(error, EsmerayError):
        return str(error)
    if is_out_of_memory(error):
        return f"memory ran out: {REMEDY}"
    return f"{type(error).__name__}: {error}"


def _failed(worker: Worker, position: Position, error: EsmerayError | None) -> Outcome:
    message = str(error) if error else "another worker failed"
    outcome = Outcome("failed", position.step, message, error.exit_code if error else 1)
    if error is not None:
        worker.run.write_outcome(outcome)
    return outcome


def _diverged(worker: Worker, position: Position) -> Outcome:
    message = (
        f"loss or gradient was not finite in {position.nonfinite_in_a_row} steps in a row, "
        f"the last one step {position.step}; "
        f"the record ids are in {worker.run.nonfinite}: lower training.learning_rate, or look at these records"
    )
    return Outcome("diverged", position.step, message, DivergenceError.exit_code)


def _rng_file(rank: int) -> str:
    return f"rng-rank-{rank:05d}.pt"
