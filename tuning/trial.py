"""Real tokens per second and peak memory of a configuration, measured by training with it for some seconds.

In: a resolved config, a store, how to measure. Out: a :class:`Measurement`. The loader, the model, the engine and the
steps are those of training; nothing is logged, saved or exported. Every worker runs :func:`measure_on_worker`; who
starts the workers, and what is tried next, is decided elsewhere (:mod:`tuning.pool`).

A window is a stretch of steps from the agreement before one step to that before another, so that it holds as many waits
for data as computations. Worker 0 says when a window is over, in the agreement that every step begins with anyway.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from common.errors import DataError, EsmerayError
from common.timing import agree
from dataset.batches.steps import StepBatches, TrainingSteps
from model.parameter_groups import parameter_groups
from run_folder.paths import RunFolder
from train_config.schema import Config
from train_config.tune_schema import MeasurementSection, SearchSection
from training.engine.collective import ControlGroup
from training.engine.context import WorkerContext
from training.engine.deepspeed_settings import check_precision
from training.engine.device import apply_device_settings
from training.engine.engine import StepResult, TrainingEngine
from training.engine.memory_meter import MemoryMeter, is_out_of_memory
from training.engine.step_clock import StepClock
from training.loop.schedule import learning_rate
from training.loop.stepping import Stepper
from tuning.settings import Measurement, Status

if TYPE_CHECKING:
    from model.tasks.base import TaskModel
    from training.tasks.experiment import Experiment

_FAILURES: tuple[Status, ...] = ("nan", "refused", "crash", "out_of_memory")
"""Failures that workers agree on, the gravest last."""

SHARES = ("data_wait", "forward", "backward", "optimizer", "communication")
DTYPES = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRUNE_MARGIN = SearchSection().prune_margin
_LONG_RUN_STEPS = 1_000_000


def measure_on_worker(
    config: Config,
    context: WorkerContext,
    store_path: str,
    measurement: MeasurementSection,
    best_tokens_per_s: float | None,
    *,
    prune_margin: float = PRUNE_MARGIN,
    inference: bool = False,
) -> Measurement:
    """Train until two windows agree. Every worker calls it; a process group exists.

    Args:
        config: the resolved config with the trial's settings; ``run.storage_path`` is absolute.
        context: rank and device.
        store_path: the store, for the classifier the labelled one.
        measurement: warm-up and windows.
        best_tokens_per_s: the fastest so far; a trial that can't reach it ends before its windows agree.
        prune_margin: see :class:`~train_config.tune_schema.SearchSection`.
        inference: forward passes alone, without gradients.

    Returns:
        Alike on every worker where they ``agreed``; a worker that met a failure has the ``reason``. Where memory ran
        out inside a step of several workers they did not, and the others may wait for this one for ever.

    Raises:
        EsmerayError: the settings or the data are refused.
        Exception: something broke.
    """
    limit_mib = config.training.cpu_memory_limit_mib
    meter = MemoryMeter(context.device, None if limit_mib is None else int(limit_mib * 2**20))
    meter.free()
    try:
        control = ControlGroup()
        trial = _Trial(context, measurement, best_tokens_per_s, prune_margin, control, meter)
        return _with_work(config, context, store_path, control, inference, trial.run)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return _ran_out(error, meter)
    finally:
        if config.training.compile:
            torch.compiler.reset()
        meter.free()


def _ran_out(error: Exception, meter: MemoryMeter) -> Measurement:
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    return Measurement(
        "out_of_memory",
        f"out of memory: {message}",
        peak_memory_bytes=meter.peak_bytes(),
        total_memory_bytes=meter.total_bytes(),
        agreed=False,
    )


def _with_work(
    config: Config,
    context: WorkerContext,
    store_path: str,
    control: ControlGroup,
    inference: bool,
    run: Callable[[Work, TrainingSteps], Measurement],
) -> Measurement:
    """Build what training builds, run the trial on it, and let go of it."""
    from training.tasks.registry import open_experiment

    config = _without_long_preparation(config)
    if not inference:
        check_precision(config.training, context.device.type)
    torch.manual_seed(config.run.seed + context.rank)
    apply_device_settings(config.training)
    folder = RunFolder(config.run.storage_path, config.run.name)
    experiment = open_experiment(config, context, folder, Path(store_path))
    try:
        model = experiment.build_model()
        experiment.open(model, context, control)
        experiment.prepare(model, context, control)
        if config.training.compile:
            model.compile(dynamic=True)
        work: Work = (
            _Inference(config, model, context)
            if inference
            else TrainingWork(config, experiment, model, context, control)
        )
        try:
            return run(work, experiment.batches)
        finally:
            work.close()
    finally:
        experiment.close()


def _without_long_preparation(config: Config) -> Config:
    """The autoencoder's normalisation from a single step: what it comes to changes neither speed nor memory."""
    autoencoder = config.model.autoencoder.model_copy(update={"normalization_tokens": 1})
    return config.model_copy(update={"model": config.model.model_copy(update={"autoencoder": autoencoder})})


class TrainingWork:
    """Steps of training, as the training loop takes them."""

    def __init__(
        self,
        config: Config,
        experiment: Experiment,
        model: TaskModel,
        context: WorkerContext,
        control: ControlGroup,
    ) -> None:
        self._settings, self._control = config.training, control
        groups = parameter_groups(model, config.training.weight_decay, experiment.rate_shares(model))
        self._engine = TrainingEngine(model, groups, config.training, config.deepspeed, context.device)
        self.model: Any = self._engine.module
        self.clock = StepClock(config.training.log_every_steps, context.device)
        self._stepper = Stepper(self._engine, control, self.clock)
        self._total_steps = config.training.max_steps or _LONG_RUN_STEPS
        self._steps = 0

    def step(self, step: StepBatches, global_targets: int) -> bool:
        sums = self._stepper.forward_backward(step, global_targets)
        with self.clock.phase("optimizer"):
            result = self._engine.step(learning_rate(self._steps, self._total_steps, self._settings))
        # The loop adds up the metrics in steps that it logs: a part of the time that training takes.
        logged = result.skipped or self.clock.log_due(self._steps)
        totals = sums.over_workers(self._control) if logged else {}
        self._steps += 1
        return not result.skipped or self._scale_is_falling(result, totals)

    def _scale_is_falling(self, result: StepResult, totals: dict[str, torch.Tensor]) -> bool:
        """With fp16 the first steps are left out until the loss scale fits, which is no failure."""
        searching = self._settings.amp_dtype == "fp16" and not result.loss_scale_exhausted
        return searching and math.isfinite(float(totals["loss"]))

    def close(self) -> None:
        self._engine.close()


class _Inference:
    """Forward passes in the precision of ``training.amp_dtype``, each worker for itself."""

    def __init__(self, config: Config, model: TaskModel, context: WorkerContext) -> None:
        self._device = context.device
        self.model = model.requires_grad_(False).eval().to(context.device, DTYPES[config.training.amp_dtype])
        self.clock = StepClock(1, context.device)

    @torch.inference_mode()
    def step(self, step: StepBatches, global_targets: int) -> bool:
        losses = []
        for batch in step:
            with self.clock.phase("forward"):
                losses.append(self.model(batch.to(self._device, non_blocking=True)).metrics["loss"])
        return math.isfinite(float(torch.stack(losses).sum()))

    def close(self) -> None:
        pass


Work: TypeAlias = TrainingWork | _Inference


class _Trial:
    """Warm-up, then windows, on one worker."""

    def __init__(
        self,
        context: WorkerContext,
        measurement: MeasurementSection,
        best_tokens_per_s: float | None,
        prune_margin: float,
        control: ControlGroup,
        meter: MemoryMeter,
    ) -> None:
        self._is_first = context.rank == 0
        self._world_size = context.world_size
        self._settings, self._control, self._meter = measurement, control, meter
        self._to_beat, self._prune_margin = best_tokens_per_s or 0.0, prune_margin
        self._windows: list[float] = []

    def run(self, work: Work, batches: TrainingSteps) -> Measurement:
        """Step until two windows agree, it can not win, or a worker failed."""
        clock, steps = work.clock, _every_step(batches)
        failure: _Failure | None = None
        number, tokens, began = 0, 0, math.inf
        clock.start()
        while True:
            step = None
            try:
                step = next(steps)
            except EsmerayError as error:
                failure = failure or _Failure("crash" if error.retryable else "refused", str(error))
            clock.loaded()
            over = self._is_first and time.perf_counter() - began >= self._settings.window_s
            with clock.phase("communication"):
                agreement = self._control.agree(
                    0 if step is None else step.num_targets,
                    0 if step is None else step.num_tokens,
                    stop=over,
                    failed=failure is not None,
                )
            if agreement.failed or step is None:
                return self._failed(failure)
            if number == self._settings.warmup_steps:
                clock.read()
                tokens, began = 0, time.perf_counter()
            elif agreement.stop:
                now = time.perf_counter()
                if (status := self._window(tokens / (now - began))) is not None:
                    return self._finished(status, clock)
                tokens, began = 0, now
            tokens += agreement.tokens
            failure = self._take(work, step, number, agreement.targets)
            clock.stepped(agreement.tokens, step.num_tokens)
            clock.start()
            number += 1

    def _take(self, work: Work, step: StepBatches, number: int, global_targets: int) -> _Failure | None:
        """Compute a step; return what failed, for the agreement of the workers."""
        finite = work.step(step, global_targets)
        try:
            self._meter.check()
        except torch.OutOfMemoryError as error:
            return _Failure("out_of_memory", f"out of memory: {error}")
        return None if finite else _Failure("nan", f"loss or gradient was not finite in step {number}")

    def _window(self, rate: float) -> Status | None:
        """Add a window, as worker 0 timed it; return the result of the trial, or None if it continues."""
        rate = float(self._control.from_rank_0(json.dumps(rate)))
        self._windows.append(rate)
        if self._agree():
            return "ok"
        if self._can_not_win():
            return "pruned"
        return "ok" if len(self._windows) >= self._settings.max_windows else None

    def _can_not_win(self) -> bool:
        """Return whether it is slower than the fastest; with more windows a smaller difference is enough."""
        count = len(self._windows)
        return statistics.mean(self._windows) < self._to_beat * (1 - self._prune_margin / count)

    def _agree(self) -> bool:
        return len(self._windows) > 1 and agree(self._windows[-2], self._windows[-1], self._settings.agreement)

    def _finished(self, status: Status, clock: StepClock) -> Measurement:
        rate = statistics.median(self._windows[-2:] if self._agree() else self._windows)
        reason = f"{rate:,.0f} tokens/s"
        if status == "pruned":
            reason += ", too slow to win"
        elif len(self._windows) > 1 and not self._agree():
            reason += f", though no two of {len(self._windows)} windows agreed within {self._settings.agreement:.0%}"
        return Measurement(
            status, reason, tokens_per_s=rate, windows=self._windows, shares=self._shares(clock), **self._memory()
        )

    def _failed(self, failure: _Failure | None) -> Measurement:
        """The gravest failure, on all workers alike; the reason only on those that have one."""
        row = [[-1 if failure is None else _FAILURES.index(failure.status)]]
        status = _FAILURES[int(self._control.gather_rows(torch.tensor(row)).max())]
        reason = failure.reason if failure is not None and failure.status == status else ""
        return Measurement(status, reason, windows=self._windows, **self._memory())

    def _memory(self) -> dict[str, Any]:
        """Of the worker that took most."""
        row = [[self._meter.peak_bytes(), self._meter.total_bytes()]]
        rows = self._control.gather_rows(torch.tensor(row))
        return {"peak_memory_bytes": int(rows[:, 0].max()), "total_memory_bytes": int(rows[:, 1].min())}

    def _shares(self, clock: StepClock) -> dict[str, float]:
        clock.stepped(0)  # the wait before the step that is not taken any more
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # or the last phases would not be known yet
        seconds = clock.read()
        own = {name: torch.tensor(seconds[f"{name}_s"] / seconds["step_s"]) for name in SHARES}
        return {name: float(total) / self._world_size for name, total in self._control.sum(own).items()}


@dataclass(frozen=True)
class _Failure:
    status: Status
    reason: str


def _every_step(batches: TrainingSteps) -> Iterator[StepBatches]:
    """The steps of one epoch after the other."""
    epoch = 0
    while True:
        empty = True
        for step in batches.epoch(epoch):
            empty = False
            yield step
        if empty:
            raise DataError("there is no record to train on: all are held out by data.validation_share")
        epoch += 1
