"""A worker of training before any step: data, model, engine, checkpoints, memory guard and sampler.

In: the config, rank and device, the run's folder, a store on disk. Out: a :class:`Worker`.
"""

import json
import logging
import os
from functools import partial
from pathlib import Path

import torch

from esmeray.cluster.collective import ControlGroup, WorkerContext
from esmeray.common.errors import DataError
from esmeray.model.cost.flops import training_flops_per_token
from esmeray.monitoring.sampling.memory_meter import MemoryMeter
from esmeray.monitoring.sampling.peaks import peak_tflops
from esmeray.monitoring.sampling.sampler import Sampler
from esmeray.run_folder.checkpoints import CheckpointFolder, CheckpointStore
from esmeray.run_folder.metrics_log import MetricsLog
from esmeray.run_folder.mirror import RunMirror, place_of
from esmeray.run_folder.paths import RunFolder, sample_file
from esmeray.tasks.experiment import Experiment, experiment_class
from esmeray.training.checkpoints.writer import CheckpointWriter
from esmeray.training.config import Config
from esmeray.training.engine.deepspeed_settings import zero_stage
from esmeray.training.engine.engine import TrainingEngine, apply_device_settings, prepare_layers
from esmeray.training.engine.memory_guard import MemoryGuard
from esmeray.training.engine.memory_state import MemoryState, copy_bytes, sweep
from esmeray.training.engine.watchdog import Watchdog, set_stacks_aside
from esmeray.training.loop.schedules import steps_before_decay

logger = logging.getLogger(__name__)


class Worker:
    """Everything that one worker holds during training.

    ``step`` is the number of steps taken, ``saved_step`` that of the newest checkpoint, ``branch_step`` that of the one
    from which wsd can be prolonged; ``hung`` holds the stacks of an attempt that a watchdog ended.
    """

    def __init__(
        self, config: Config, context: WorkerContext, run: RunFolder, store_path: str, wandb_run_id: str | None
    ) -> None:
        self.config, self.context, self.run, self.wandb_run_id = config, context, run, wandb_run_id
        self.step = self.saved_step = 0
        training = config.training
        # Random weights are the same on every worker, also where ZeRO-3 cuts them later.
        torch.manual_seed(config.run.seed)
        apply_device_settings(training)
        self.control = control = ControlGroup()
        # One writer: workers of other nodes may not see the folder, and lines of several would mix.
        self.log = MetricsLog(run.metrics if context.rank == 0 else os.devnull)
        # Nodes may share the run's folder or have one each: what is done once is done once for each folder.
        places = control.gather(place_of(run))
        ranks = [rank for rank, place in enumerate(places) if place == places[context.rank]]
        self.leads = context.rank == ranks[0]  # among the workers that see the same folder
        self.mirror = RunMirror(run, self._warn, context.rank, self._log_checkpoint)
        if self.leads:
            self.mirror.pull(checkpoints_only=True)
        control.all_true(True)  # nobody looks before the leaders have them
        experiment: Experiment = experiment_class(config.model)(config.task_settings, context, run, Path(store_path))
        self.experiment = experiment
        model = experiment.build_model()
        experiment.open(model, context, control)
        # Each node may have converted the source itself: other records would be other batches, without an error.
        if control.from_rank_0(experiment.checksum) != experiment.checksum:
            raise DataError(f"data.source: {', '.join(config.data.source)} is other data on another node; start again")
        self.checkpoints = CheckpointStore(run.checkpoints)
        self.hung = set_stacks_aside(run.logs) if self.leads else None  # before the others open files there
        # A resumed model has what is prepared (the scales of features, say) in its checkpoint.
        starts_anew = not control.from_rank_0("\n".join(folder.path.name for folder in self.checkpoints.complete()))
        if starts_anew:
            experiment.prepare(model, context, control)
        # Before the engine: it takes the parameters as they are then.
        prepare_layers(model.backbone, training, context.device, zero_stage(training, config.deepspeed))
        flops_per_token = training_flops_per_token(
            model, experiment.batches.mean_context, runs_backbone=experiment.runs_backbone
        )
        rate_shares = experiment.rate_shares(model)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)  # before ZeRO-3 cuts them
        self.engine = TrainingEngine(model, training, config.deepspeed, context.device, rate_shares)
        # At a URI a checkpoint counts once it is there, not when it is on the node's own disk.
        completed = self._log_checkpoint if run.uri is None else self.mirror.ask
        self.total_steps = training.max_steps or experiment.batches.total_steps(training.epochs)
        self.branch_step = steps_before_decay(self.total_steps, training) if training.schedule == "wsd" else None
        self.writer = CheckpointWriter(
            self.checkpoints, context.rank, ranks, config.checkpoint, completed, self.branch_step
        )
        self.memory = self._memory_state(trained)
        self.guard = self._make_guard()
        self.sampler = self._start_sampler(flops_per_token) if training.gpu_log_interval > 0 else None
        # Last: features of a frozen backbone, say, may have taken hours.
        self.watchdog = Watchdog(run.logs, context.rank, self._watchdog_s())

    def end_requested(self) -> bool:
        """True on worker 0 where the driver asked for an end; the agreement before a step shares it."""
        self.watchdog.progress()
        return self.context.rank == 0 and self.run.end_requested()

    def stop_requested(self) -> bool:
        """The same for an end that can't wait for an evaluation, which is not taken again: asked before its batches."""
        self.watchdog.progress()
        return self.context.rank == 0 and self.run.stop_requested()

    def forget_peak(self) -> None:
        """Keep the memory of an evaluation or a checkpoint from counting as a step's."""
        if self.guard is not None:
            self.guard.meter.forget_peak()

    def stop_sampling(self) -> None:
        """Take a last sample. May be called again."""
        if self.sampler is not None:
            self.sampler.close()

    def leave(self, is_over: bool) -> None:
        """End what works beside training; the copies in memory go where the run is over. May be called again."""
        self.stop_sampling()
        self.watchdog.close()
        if self.memory is not None:
            self.memory.close(keep=not is_over)

    def _log_checkpoint(self, folder: CheckpointFolder) -> None:
        self.log.event("checkpoint", folder.step, checkpoint=folder.path.name)

    def _warn(self, message: str) -> None:
        logger.warning(message)
        self.log.event("warning", self.step, message=message)

    def _memory_state(self, trained: int) -> MemoryState | None:
        config, context = self.config, self.context
        if config.checkpoint.memory_every_steps is None:
            sweep()  # copies of runs that ended without a word hold memory of this machine
            return None
        size_bytes = copy_bytes(
            trained,
            stage=self.engine.stage,
            world_size=context.world_size,
            precision=config.training.precision,
            weight_mean=config.training.weight_mean is not None,
        )
        # Of the same command alone: what may change on resume is for the disk's checkpoints.
        same = [str(self.run.path), self.wandb_run_id, self.experiment.checksum, context.world_size]
        identity = json.dumps([*same, config.model_dump(mode="json")])
        return MemoryState(identity, config.checkpoint, context, self.control, size_bytes)

    def _watchdog_s(self) -> float | None:
        # A batch that waits for structures, which are predicted meanwhile, may wait for any time.
        waits = self.config.data.predictions.on_miss == "wait"
        return self.config.training.watchdog_s if self.context.replaced and not waits else None

    def _make_guard(self) -> MemoryGuard | None:
        training = self.config.training
        section, limit_mib = training.memory_guard, training.cpu_memory_limit_mib
        if not section.enabled:
            if limit_mib is None:
                return None
            section = section.model_copy(update={"max_halvings": 0})  # the limit is to end the run
        return MemoryGuard(
            section,
            MemoryMeter(self.context.device, None if limit_mib is None else int(limit_mib * 2**20)),
            self.run.memory_guard,
            report=lambda message, parts: self.log.event("memory_guard", self.step, parts=parts, message=message),
        )

    def _start_sampler(self, flops_per_token: float) -> Sampler:
        config, context = self.config, self.context
        peak = config.monitoring.peak_tflops
        if peak is None and context.device.type == "cuda":
            is_tf32 = config.training.precision == "fp32" and config.training.tf32
            name = torch.cuda.get_device_name(context.device)
            peak = peak_tflops(name, "tf32" if is_tf32 else config.training.precision)
        return Sampler(
            path=sample_file(self.run.monitoring, context.rank),
            worker=context.rank,
            device=context.device,
            node=context.local_rank == 0,
            interval_s=config.training.gpu_log_interval,
            prometheus=config.monitoring.prometheus,
            warn=partial(logger.warning, "worker %d: %s", context.rank),
            flops_per_token=flops_per_token,
            peak_tflops=None if peak is None else peak * context.world_size,
        ).start()
