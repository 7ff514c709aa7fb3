"""The training loop that every worker runs, whatever started it: build, restore, loop, finish.

In: the config, a store on disk, an initialised process group. Out: checkpoints, metrics.jsonl, an exported model and
the run's outcome, in the run's folder. What happens alike on every worker needs no agreement; what happens on one (a
signal, a damaged record) is told to all before the next step, so that all end after the same step.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from dataset.loader import TrainingBatches, ValidationBatches
from dataset.splitting import split_records
from dataset.steps import StepBatches
from dataset.store import Store
from model.autoencoder import ESM2Autoencoder
from model.parameter_groups import parameter_groups
from model.registry import build_model
from monitoring.metrics_log import read_metrics
from train_config.errors import CheckpointError, DivergenceError, EsmerayError, ResourceError
from train_config.schema import Config
from training.checkpoint import CheckpointStore, Manifest, Position
from training.checkpoint_writer import CheckpointWriter
from training.collective import ControlGroup, StepAgreement
from training.context import WorkerContext
from training.engine import StepResult, TrainingEngine
from training.finishing import export_final, save_nonfinite_records
from training.metric_sums import MetricSums, evaluate
from training.restoring import find_checkpoint, random_states, restore_random_states
from training.run_folder import Outcome, RunFolder
from training.run_log import RunLog
from training.schedule import learning_rate
from training.step_clock import StepClock
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
    batches: TrainingBatches
    validation: ValidationBatches
    checkpoints: CheckpointStore
    writer: CheckpointWriter
    store: Store
    wandb_run_id: str | None
    total_steps: int

    def stop_requested(self) -> bool:
        """Whether the driver asked for an end; worker 0 looks, the others hear of it."""
        return self.context.rank == 0 and self.run.stop_requested()


def train_worker(config: Config, context: WorkerContext, store_path: str, wandb_run_id: str | None = None) -> Outcome:
    """Train to the end, to a request to stop or to a failure that would repeat.

    Args:
        config: the resolved config; ``run.storage_path`` is absolute.
        context: rank and device; a process group exists.
        store_path: the LMDB store, on a disk of this node.
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
        position = restore(worker)
        outcome = loop(worker, position)
        return finish(worker, outcome)
    except Exception as error:
        if (exit_code := repeatable(error)) is not None:
            run.write_outcome(Outcome("failed", -1, _described(error), exit_code))
        raise


def build(config: Config, context: WorkerContext, run: RunFolder, store_path: str, wandb_run_id: str | None) -> Worker:
    """Data, model and engine, before any step."""
    torch.manual_seed(config.run.seed + context.rank)
    torch.use_deterministic_algorithms(config.training.deterministic)
    torch.set_float32_matmul_precision("high" if config.training.tf32 else "highest")
    control = ControlGroup()
    store = Store(store_path)
    batches, validation = _open_batches(config, context, store)
    model = build_model(config.model, config.run.seed)
    checkpoints = CheckpointStore(run.checkpoints)
    starts_anew = not control.from_rank_0("\n".join(folder.path.name for folder in checkpoints.complete()))
    if isinstance(model, ESM2Autoencoder) and starts_anew:
        model.to(context.device)
        measure_features(model, batches, config.model.autoencoder.normalization_tokens, context, control)
    if config.training.compile:
        model.compile(dynamic=True)
    groups = parameter_groups(model, config.training.weight_decay)
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
    return Worker(
        config=config,
        context=context,
        run=run,
        log=log,
        control=control,
        engine=engine,
        batches=batches,
        validation=validation,
        checkpoints=checkpoints,
        writer=writer,
        store=store,
        wandb_run_id=wandb_run_id,
        total_steps=config.training.max_steps or batches.total_steps(config.training.epochs),
    )


def restore(worker: Worker) -> Position:
    """Go on from the newest checkpoint that holds; the start where there is none."""
    rank, control = worker.context.rank, worker.control
    if rank == 0:
        worker.run.checkpoints.mkdir(parents=True, exist_ok=True)
        worker.checkpoints.sweep()
    control.all_true(True)  # nobody looks before rank 0 has swept
    found = find_checkpoint(worker.checkpoints, rank, worker.context.world_size, worker.store.checksum, control)
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
        cropped = worker.batches.cropped
        worker.log.event(
            "started",
            0,
            total_steps=worker.total_steps,
            cropped_sequences=cropped.sequences,
            cropped_residues=cropped.residues,
        )
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
    saved_step = position.step
    if position.step == 0:
        validate(worker, position)  # where it starts from
    steps = _steps_from(worker.batches, position, worker.total_steps)
    clock = StepClock(config.training.log_every_steps)
    while position.step < worker.total_steps:
        step, error = _next_step(steps, worker.writer)
        agreement = _agree(worker, step, error)
        if agreement.failed or step is None:
            return _failed(worker, position, error)
        if agreement.stop:
            if position.step > saved_step:
                save(worker, position, None)
            return Outcome("stopped", position.step, f"stopped at step {position.step}; the same command goes on", 0)
        clock.loaded()
        sums = _forward_backward(engine, step, agreement.targets)
        rate = learning_rate(position.step, worker.total_steps, config.training)
        result = engine.step(rate)
        totals = sums.over_workers(control) if result.skipped or clock.log_due(position.step) else None
        nonfinite = result.skipped and _is_fault(worker, result, totals or {})
        if nonfinite:
            save_nonfinite_records(worker.run, worker.store, position.step, worker.context.rank, step.batches)
        position = _advance(position, step, agreement, result.skipped, nonfinite)
        clock.stepped(agreement.tokens)
        if totals is not None:
            _log_step(worker, position, totals, result, rate, clock)
        if position.nonfinite_in_a_row >= config.training.max_nonfinite_steps:
            return _diverged(worker, position)
        last = position.step == worker.total_steps
        saving = last or position.step % config.checkpoint.every_steps == 0
        # A checkpoint is one of the best only if its loss is known.
        validating = position.step % config.training.evaluate_every_steps == 0 or (
            saving and config.checkpoint.keep_best
        )
        loss = validate(worker, position) if last or validating else None
        if saving:
            save(worker, position, loss)
            saved_step = position.step
        clock.start()
    return Outcome("finished", position.step, f"trained {position.step} steps", 0)


def finish(worker: Worker, outcome: Outcome) -> Outcome:
    """Wait for the last checkpoint, export the model, leave word of how it ended."""
    if outcome.status != "failed":
        worker.writer.wait()
    if outcome.status == "finished":
        export_final(worker.engine, worker.config, worker.run, worker.context.rank, outcome.step)
    worker.control.all_true(True)  # every shard is on disk
    if worker.context.rank == 0 and worker.run.read_outcome() is None:
        worker.log.event(outcome.status, max(outcome.step, 0), message=outcome.message)
        worker.run.write_outcome(outcome)
    worker.log.close()
    worker.batches.close()
    worker.validation.close()
    worker.engine.close()
    return outcome


def validate(worker: Worker, position: Position) -> float | None:
    """Evaluate on the held-out sequences; returns the loss. Every worker calls it."""
    totals = evaluate(worker.engine, worker.validation.steps(), worker.control, worker.stop_requested)
    if not totals:
        return None  # nothing is held out, or a stop was asked for
    figures = _figures(worker, totals)
    worker.log.write("validation", position.step, epoch=position.epoch, **figures)
    loss = figures.get("loss")
    return loss if loss is not None and math.isfinite(loss) else None


def save(worker: Worker, position: Position, validation_loss: float | None) -> None:
    """Start writing a checkpoint and report to the launcher. Every worker calls it."""
    rank, config = worker.context.rank, worker.config
    shards = [*worker.engine.copy_shards(), (_rng_file(rank), random_states())]
    manifest = Manifest(
        position=position,
        world_size=worker.context.world_size,
        seed=config.run.seed,
        store_checksum=worker.store.checksum,
        wandb_run_id=worker.wandb_run_id,
        validation_loss=validation_loss,
        config=config.model_dump(mode="json"),
        versions=installed_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        files={},
    )
    worker.writer.write(shards, manifest)
    metrics = {"step": float(position.step), "tokens_seen": float(position.tokens_seen)}
    worker.context.report(metrics | ({} if validation_loss is None else {"validation_loss": validation_loss}))


def measure_features(
    model: ESM2Autoencoder, batches: TrainingBatches, tokens: int, context: WorkerContext, control: ControlGroup
) -> None:
    """Fix the autoencoder's normalisation from the first steps of the first epoch, all workers together."""
    statistics = model.new_statistics()
    seen = 0
    for step in batches.epoch(0):
        for batch in step.batches:
            model.measure(batch.to(context.device), statistics)
        seen += control.agree(0, step.num_tokens, stop=False, failed=False).tokens
        if seen >= tokens:
            break
    sums = control.sum({str(index): tensor for index, tensor in enumerate(statistics.tensors)})
    for index, tensor in enumerate(statistics.tensors):
        tensor.copy_(sums[str(index)])
    model.set_normalization(statistics)


def _open_batches(config: Config, context: WorkerContext, store: Store) -> tuple[TrainingBatches, ValidationBatches]:
    training, held_out = split_records(store.sequence_hashes, config.data.validation_share)
    common: dict[str, Any] = {
        "data": config.data,
        "batch": config.batch,
        "task": config.model.task,
        "masked_lm": config.model.masked_lm,
        "rank": context.rank,
        "world_size": context.world_size,
    }
    return (
        TrainingBatches(store.path, training, seed=config.run.seed, **common),
        ValidationBatches(store.path, held_out, max_batches=config.training.evaluation_batches, **common),
    )


def _steps_from(batches: TrainingBatches, position: Position, total_steps: int) -> Iterator[StepBatches]:
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


def _forward_backward(engine: TrainingEngine, step: StepBatches, global_targets: int) -> MetricSums:
    sums = MetricSums()
    for batch in step:
        output = engine(batch.to(engine.device, non_blocking=True))
        engine.backward(output.loss_sum, global_targets)
        sums.add(output.metrics)
    return sums


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
    worker.log.write(
        "train",
        position.step,
        epoch=position.epoch,
        **_figures(worker, totals),
        learning_rate=rate,
        gradient_norm=result.gradient_norm,
        skipped=result.skipped,
        skipped_steps=position.skipped_steps,
        tokens_seen=position.tokens_seen,
        **clock.read(),
    )
    if result.skipped:
        worker.log.event("nonfinite" if position.nonfinite_in_a_row else "loss_scale_lowered", position.step)


def _figures(worker: Worker, totals: dict[str, torch.Tensor]) -> dict[str, float]:
    return worker.engine.module.figures(totals)  # type: ignore[operator]


def repeatable(error: Exception) -> int | None:
    """The exit code of a failure that trying again would repeat; None for what a machine did.

    A lost peer shows as a RuntimeError of the collective or an error of Ray's, a failing disk or network as OSError:
    those are worth another try. So is an EsmerayError that says so. Everything else would only happen again.
    """
    if isinstance(error, EsmerayError):
        return None if error.retryable else error.exit_code
    if _out_of_memory(error):
        return ResourceError.exit_code
    if isinstance(error, OSError):
        return EsmerayError.exit_code if isinstance(error, FileNotFoundError | PermissionError) else None
    lost_peer = isinstance(error, RuntimeError) and _LOST_PEER.search(str(error))
    from_launcher = type(error).__module__.partition(".")[0] == "ray"
    return None if lost_peer or from_launcher else EsmerayError.exit_code


_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed? ?out|broken pipe|store", re.IGNORECASE)


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _described(error: Exception) -> str:
    if isinstance(error, EsmerayError):
        return str(error)
    if _out_of_memory(error):
        return (
            "memory ran out: set model.backbone.gradient_checkpointing true and go on, "
            "or lower batch.tokens under another run.name"
        )
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
