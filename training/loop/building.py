"""Building a worker of training: data, model, engine, checkpoints, memory guard and sampler.

In: the config, rank and device, the run's folder, a store on disk. Out: a :class:`Worker`, before any step.
"""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from model.cost.flops import training_flops_per_token
from model.parameter_groups import parameter_groups
from monitoring.sampling.memory_meter import MemoryMeter
from monitoring.sampling.sampler import Sampler, Utilization
from run_folder.checkpoints import CheckpointStore
from run_folder.metrics_log import RunLog
from run_folder.paths import RunFolder, sample_file
from train_config.schema import Config
from training.checkpoints.writer import CheckpointWriter
from training.engine.collective import ControlGroup, WorkerContext
from training.engine.deepspeed_settings import zero_stage
from training.engine.device import apply_device_settings, prepare_layers
from training.engine.engine import TrainingEngine
from training.engine.memory_guard import MemoryGuard
from training.tasks.experiment import Experiment
from training.tasks.registry import experiment_class

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
        """True on worker 0 where the driver asked for an end; the agreement before a step shares it."""
        return self.context.rank == 0 and self.run.stop_requested()

    def forget_peak(self) -> None:
        """Keep the memory of an evaluation or a checkpoint from counting as a step's."""
        if self.guard is not None:
            self.guard.meter.forget_peak()

    def stop_sampling(self) -> None:
        """Take a last sample. May be called again."""
        if self.sampler is not None:
            self.sampler.close()


def build(config: Config, context: WorkerContext, run: RunFolder, store_path: str, wandb_run_id: str | None) -> Worker:
    """Data, model and engine, before any step."""
    torch.manual_seed(config.run.seed + context.rank)
    apply_device_settings(config.training)
    control = ControlGroup()
    experiment = experiment_class(config.model.task)(config, context, run, Path(store_path))
    model = experiment.build_model()
    experiment.open(model, context, control)
    checkpoints = CheckpointStore(run.checkpoints)
    starts_anew = not control.from_rank_0("\n".join(folder.path.name for folder in checkpoints.complete()))
    if starts_anew:
        experiment.prepare(model, context, control)
    stage = zero_stage(config.training, config.deepspeed)
    prepare_layers(model.backbone, config.training, context.device, stage)
    context_size, runs_backbone = experiment.batches.mean_context, experiment.runs_backbone
    flops_per_token = training_flops_per_token(model, context_size, runs_backbone=runs_backbone)
    groups = parameter_groups(model, config.training.weight_decay, experiment.rate_shares(model))
    engine = TrainingEngine(model, groups, config.training, config.deepspeed, context.device)
    log = RunLog(run.metrics, context.rank)
    writer = CheckpointWriter(
        checkpoints,
        context.rank,
        context.world_size,
        config.checkpoint,
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
        report=lambda message, parts: worker.log.event("memory_guard", worker.step, parts=parts, message=message),
    )


def _start_sampler(worker: Worker, flops_per_token: float) -> Sampler:
    config, context = worker.config, worker.context
    return Sampler(
        sample_file(worker.run.monitoring, context.rank),
        worker=context.rank,
        device=context.device,
        node=context.local_rank == 0,
        interval_s=config.training.gpu_log_interval,
        prometheus=config.monitoring.prometheus,
        warn=partial(logger.warning, "worker %d: %s", context.rank),
        utilization=Utilization(
            flops_per_token=flops_per_token,
            peak_tflops=config.monitoring.peak_tflops,
            precision=config.training.precision,
            tf32=config.training.tf32,
            world_size=context.world_size,
        ),
    ).start()
