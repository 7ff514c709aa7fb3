"""Build a training worker before its first step: data, model, engine, checkpoints, memory guard and sampler.

Takes the config, rank and device, the run's folder and a store on disk; returns a :class:`Worker`.
"""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from esmeray.cluster.collective import ControlGroup, WorkerContext
from esmeray.common.errors import DataError
from esmeray.model.cost.flops import training_flops_per_token
from esmeray.model.task_model import TaskModel
from esmeray.monitoring.sampling.memory_meter import MemoryMeter
from esmeray.monitoring.sampling.peaks import peak_tflops
from esmeray.monitoring.sampling.sampler import Sampler
from esmeray.monitoring.section import MonitoringSection
from esmeray.run_folder.checkpoints import CheckpointStore, Manifest, Position, installed_versions
from esmeray.run_folder.mirror import RunMirror, place_of
from esmeray.run_folder.paths import RunFolder, sample_file
from esmeray.tasks.experiment import Experiment, experiment_class
from esmeray.training.checkpoints.writer import CheckpointWriter
from esmeray.training.config import Config
from esmeray.training.engine.engine import TrainingEngine, apply_device_settings
from esmeray.training.engine.memory_guard import MemoryGuard
from esmeray.training.engine.watchdog import Watchdog, set_stacks_aside
from esmeray.training.loop.checkpoints import Checkpoints
from esmeray.training.loop.observing import Observers
from esmeray.training.loop.schedules import Course, course_of
from esmeray.training.section import CheckpointSection, TrainingSection

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Worker:
    """One worker of a run, ready to train: what computes, what is kept, and the settings that decide on both."""

    experiment: Experiment
    engine: TrainingEngine
    control: ControlGroup
    guard: MemoryGuard
    observers: Observers
    checkpoints: Checkpoints
    training: TrainingSection
    checkpoint: CheckpointSection
    run: RunFolder
    course: Course


def build_worker(
    config: Config, context: WorkerContext, run: RunFolder, store_path: str, wandb_run_id: str | None
) -> Worker:
    """Build this process's worker. Every worker calls it, since much of it is collective."""
    training = config.training
    # Random weights must be the same on every worker, also if ZeRO-3 partitions them later.
    torch.manual_seed(config.run.seed)
    apply_device_settings()
    control = ControlGroup()
    observers = Observers(run, context.rank)
    # Nodes may share the run's folder or have one each. The first worker of each folder does the work that is done
    # once.
    folders = control.gather(place_of(run))
    sharing = [rank for rank, folder in enumerate(folders) if folder == folders[context.rank]]
    leads = context.rank == sharing[0]
    mirror = RunMirror(run, observers.warn, context.rank, observers.note_checkpoint)
    if leads:
        mirror.pull(checkpoints_only=True)
        observers.hung = set_stacks_aside(run.logs)  # before the other workers open files there
    control.all_true(True)  # readers wait until the leaders have pulled
    store = CheckpointStore(run.checkpoints)
    experiment: Experiment = experiment_class(config.model)(config.task_settings, context, run, Path(store_path))
    model = _prepared_model(experiment, context, control, store)
    # Before the engine is built, since ZeRO-3 partitions the parameters.
    flops_per_token = training_flops_per_token(
        model, experiment.batches.mean_context, runs_backbone=experiment.runs_backbone
    )
    engine = TrainingEngine(model, training, config.deepspeed, context.device, experiment.rate_shares(model))
    course = course_of(training, experiment.batches)
    # With a URI a checkpoint counts once it is uploaded, not when it is on the node's own disk.
    completed = observers.note_checkpoint if run.uri is None else mirror.check_now
    checkpoints = Checkpoints(
        store,
        mirror,
        engine,
        control,
        observers,
        CheckpointWriter(store, context.rank, sharing, config.checkpoint, completed, course.branch_step),
        leads,
        _manifest(config, experiment.checksum, context.world_size, wandb_run_id),
        names=experiment.names,
        report=context.report,
        is_needed=config.run.resume == "must",
        course=course,
        batches=experiment.batches,
    )
    observers.meter = MemoryMeter(context.device, training.cpu_memory_limit_mib)
    guard = MemoryGuard(
        observers.meter,
        run.memory_guard,
        lambda message, parts: observers.log.event("memory_guard", observers.step, parts=parts, message=message),
    )
    if training.gpu_log_interval > 0:
        observers.sampler = _sampler(training, config.monitoring, context, run, flops_per_token).start()
    # With on_miss wait, a batch may wait any length of time for predicted structures.
    is_limited = context.replaced and config.data.predictions.on_miss != "wait"
    # Last, since the work above may take hours, e.g. features of a frozen backbone.
    observers.watchdog = Watchdog(run.logs, context.rank, training.watchdog_s if is_limited else None)
    return Worker(experiment, engine, control, guard, observers, checkpoints, training, config.checkpoint, run, course)


def _prepared_model(
    experiment: Experiment, context: WorkerContext, control: ControlGroup, store: CheckpointStore
) -> TaskModel:
    """Return the model as it is before the first step, or before a checkpoint is loaded into it."""
    model = experiment.build_model()
    experiment.open(model, context, control)
    # Each node may have converted the source itself. Different records would silently give different batches.
    if control.from_rank_0(experiment.checksum) != experiment.checksum:
        source = ", ".join(experiment.settings.data.source)
        raise DataError(f"data.source: {source} has different content on another node; start the run again")
    # A resumed model loads its prepared state, e.g. the scales of features, from the checkpoint.
    if not control.from_rank_0([folder.step for folder in store.complete()]):
        experiment.prepare(model, context, control)
    return model


def _manifest(config: Config, store_checksum: str, world_size: int, wandb_run_id: str | None) -> Manifest:
    """Return the template of this attempt's checkpoint manifests, without the values that depend on the step."""
    return Manifest(
        position=Position(),
        world_size=world_size,
        seed=config.run.seed,
        store_checksum=store_checksum,
        wandb_run_id=wandb_run_id,
        validation_cost=None,
        config=config.model_dump(mode="json"),
        versions=installed_versions(),
        created="",
        files={},
    )


def _sampler(
    training: TrainingSection,
    monitoring: MonitoringSection,
    context: WorkerContext,
    run: RunFolder,
    flops_per_token: float,
) -> Sampler:
    peak = monitoring.peak_tflops
    if peak is None and context.device.type == "cuda":
        # Products in fp32 are computed in TF32.
        precision = "tf32" if training.precision == "fp32" else training.precision
        peak = peak_tflops(torch.cuda.get_device_name(context.device), precision)
    return Sampler(
        path=sample_file(run.monitoring, context.rank),
        worker=context.rank,
        device=context.device,
        node=context.local_rank == 0,
        interval_s=training.gpu_log_interval,
        warn=partial(logger.warning, "worker %d: %s", context.rank),
        flops_per_token=flops_per_token,
        # Token counts are summed over all workers, so the peak must be as well.
        peak_tflops=None if peak is None else peak * context.world_size,
    )
