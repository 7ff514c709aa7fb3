"""Measure real tokens per second and peak memory of a configuration, by training with it for some seconds.

Loader, model, engine and steps are the same as in training, but nothing is logged, saved or exported. The window lasts
from the agreement before one step to the agreement before another, so that it has the same number of data waits and
steps. Worker 0 ends it through the agreement that starts every step anyway.
"""

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from esmeray.cluster.collective import ControlGroup, WorkerContext
from esmeray.common.errors import EsmerayError, first_line
from esmeray.dataset.batches.steps import StepBatches, TrainingSteps
from esmeray.model.device import HostCopy, is_out_of_memory
from esmeray.monitoring.sampling.memory_meter import MemoryMeter
from esmeray.run_folder.checkpoints import Position
from esmeray.run_folder.paths import RunFolder
from esmeray.tasks.experiment import experiment_class
from esmeray.training.config import Config
from esmeray.training.engine.engine import TrainingEngine, apply_device_settings
from esmeray.training.engine.step_clock import StepClock
from esmeray.training.loop.observing import is_fault
from esmeray.training.loop.schedules import learning_rate
from esmeray.training.loop.stepping import Stepper, every_step
from esmeray.training.section import TrainingSection
from esmeray.tuning.records import Measurement, Status
from esmeray.tuning.section import MeasurementSection

FAILURES: tuple[Status, ...] = ("crash", "nan", "refused", "out_of_memory")
"""Failures of workers, in ascending priority: a crash may only be a consequence of another worker's failure."""

_SHARES = ("data_wait", "forward", "backward", "optimizer", "communication")
_NORM = "gradient norm"
_LONG_RUN_STEPS = 1_000_000
_LATE = Position(step=_LONG_RUN_STEPS)
"""Position after the start of a run, when ramps of global batches and masks have ended."""


def measure_on_worker(
    config: Config,
    context: WorkerContext,
    store_path: str,
    measurement: MeasurementSection,
    *,
    warmup_steps: int = 2,
    on_step: Callable[[], object] = lambda: None,
) -> Measurement:
    """Train for a warm-up and then for the window. Every worker calls it; a process group must exist.

    The config has the trial's settings and absolute paths. After a failure other workers may wait for this one in a
    collective forever. Raises EsmerayError if the settings or the data are refused.
    """
    meter = MemoryMeter(context.device, config.training.cpu_memory_limit_mib)
    meter.free()  # memory left by the previous trial must not count
    try:
        trial = _Trial(context, measurement, ControlGroup(), meter, warmup_steps, on_step)
        torch.manual_seed(config.run.seed)
        apply_device_settings()
        training = config.training
        task = experiment_class(config.model)
        folder = RunFolder(config.run.storage_path, config.run.name)
        with closing(task(config.task_settings, context, folder, Path(store_path))) as experiment:
            model = experiment.build_model()
            experiment.open(model, context, trial.control)
            experiment.prepare(model, context, trial.control, brief=True)
            rate_shares = experiment.rate_shares(model)
            with closing(TrainingEngine(model, training, config.deepspeed, context.device, rate_shares)) as engine:
                return trial.run(TrainingWork(engine, training, trial.control), experiment.batches)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return Measurement(
            "out_of_memory",
            f"out of memory: {first_line(error)}",
            peak_memory_bytes=meter.peak_bytes(),
            total_memory_bytes=meter.total_bytes(),
        )
    finally:
        torch.compiler.reset()  # otherwise recompilations of several trials add up to torch's limit
        meter.free()


class TrainingWork:
    """Steps as in the training loop; ``step`` returns False if one was not finite."""

    def __init__(self, engine: TrainingEngine, training: TrainingSection, control: ControlGroup) -> None:
        self._engine = engine
        self._settings = training
        self._control = control
        self.clock = StepClock(engine.device)
        self._stepper = Stepper(engine, control, self.clock)
        self._total_steps = training.max_steps or _LONG_RUN_STEPS
        self._steps = 0
        self._late = engine.device.type == "cuda"
        self._unread: HostCopy | None = None

    def step(self, step: StepBatches, global_targets: int) -> bool:
        sums = self._stepper.forward_backward(step, global_targets)
        with self.clock.phase("optimizer"):
            result = self._engine.step(learning_rate(self._steps, self._total_steps, self._settings))
        # Like the loop, this reads results a step later on a GPU, and sums them over workers.
        values = HostCopy({**sums.own, _NORM: result.gradient_norm})
        due = self._unread if self._late and self._unread is not None else values
        self._unread = values
        own = due.read()
        skipped = not math.isfinite(float(own.pop(_NORM)))
        totals = self._control.sum(own)
        self._steps += 1
        # With fp16 the first steps are skipped until the loss scale fits, which is no failure.
        return not (skipped and is_fault(self._settings.precision, result.lowest_scale, totals))


@dataclass
class _Trial:
    """Warm-up, then the window, on one worker."""

    context: WorkerContext
    settings: MeasurementSection
    control: ControlGroup
    meter: MemoryMeter
    warmup_steps: int
    on_step: Callable[[], object]

    def run(self, work: TrainingWork, batches: TrainingSteps) -> Measurement:
        clock = work.clock
        steps = every_step(batches, _LATE)
        failure: Measurement | None = None
        # The window begins after the warm-up; until then it can't end.
        number, tokens, began = 0, 0, math.inf
        clock.start()
        while True:
            step = None
            try:
                step = next(steps)
            except EsmerayError as error:
                # Not raised: the agreement below reports it to the others, which would otherwise wait for this worker.
                failure = failure or Measurement("crash" if error.retryable else "refused", str(error))
            clock.loaded()
            # After loading, so that the window has the same number of data waits and steps.
            over = self.context.rank == 0 and time.perf_counter() - began >= self.settings.window_s
            with clock.phase("communication"):
                targets, own_tokens = (0, 0) if step is None else (step.num_targets, step.num_tokens)
                agreement = self.control.agree(targets, own_tokens, stop=over, failed=failure is not None)
            if agreement.failed or step is None:
                return self._failed(failure)
            if agreement.stop:
                # The rate of worker 0 on all workers: the result is the same on each.
                rate = self.control.from_rank_0(tokens / (time.perf_counter() - began))
                reason = f"{rate:,.0f} tokens/s"
                return Measurement("ok", reason, rate, shares=self._shares(clock), **self._memory())
            if number == self.warmup_steps:
                clock.read()  # discards the phases of the warm-up
                tokens, began = 0, time.perf_counter()
            tokens += agreement.tokens
            failure = self._step(work, step, number, agreement.targets)
            clock.stepped(agreement.tokens, step.num_tokens)
            clock.start()
            number += 1
            self.on_step()

    def _step(self, work: TrainingWork, step: StepBatches, number: int, global_targets: int) -> Measurement | None:
        finite = work.step(step, global_targets)
        try:
            # No CPU allocation fails by itself: the peak is compared with the limit after the step.
            self.meter.check()
        except torch.OutOfMemoryError as error:
            return Measurement("out_of_memory", f"out of memory: {error}")
        return None if finite else Measurement("nan", f"loss or gradient was not finite in step {number}")

    def _failed(self, failure: Measurement | None) -> Measurement:
        """Return the most severe failure, the same on all workers."""
        failures = filter(None, self.control.gather(failure))
        gravest: Measurement = max(failures, key=lambda failure: FAILURES.index(failure.status))
        return replace(gravest, **self._memory())

    def _memory(self) -> dict[str, Any]:
        # All workers share one configuration: compare the largest peak with the smallest memory.
        peaks, totals = zip(*self.control.gather((self.meter.peak_bytes(), self.meter.total_bytes())), strict=True)
        return {"peak_memory_bytes": max(peaks), "total_memory_bytes": min(totals)}

    def _shares(self, clock: StepClock) -> dict[str, float]:
        clock.stepped(0)  # adds the wait before the step that is not taken
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # otherwise the last phases are not available yet
        seconds = clock.read()
        own = {name: torch.tensor(seconds[f"{name}_s"] / seconds["step_s"]) for name in _SHARES}
        return {name: float(total) / self.context.world_size for name, total in self.control.sum(own).items()}
