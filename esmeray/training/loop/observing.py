"""Observers of a worker: log, samples, watchdog and step results. None of them changes a result.

They write records to the run's folder, and read the driver's requests from it. On a GPU the results of a step are read
one step later, when the device has finished it, so that the device never waits for the host.
"""

import json
import logging
import math
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from esmeray.cluster.collective import ControlGroup, MetricSums
from esmeray.common.publishing import write_atomically
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.model.device import HostCopy
from esmeray.monitoring.sampling.memory_meter import MemoryMeter
from esmeray.monitoring.sampling.sampler import Sampler
from esmeray.run_folder.checkpoints import CheckpointFolder, Position
from esmeray.run_folder.metrics_log import MetricsLog, Record, read_metrics
from esmeray.run_folder.paths import RunFolder
from esmeray.tasks.experiment import Experiment
from esmeray.training.engine.engine import StepResult, TrainingEngine
from esmeray.training.engine.step_clock import StepClock
from esmeray.training.engine.watchdog import Watchdog

logger = logging.getLogger(__name__)

_NORM = "gradient norm"


class Observers:
    """Observers of one worker. Sampler, meter and watchdog are set once there is something to observe.

    ``step``: number of steps taken, at which background threads log. ``hung``: folder with the stacks of an attempt
    that a watchdog ended.
    """

    def __init__(self, run: RunFolder, rank: int) -> None:
        self.run, self.rank = run, rank
        self.step = 0
        # A single writer: workers of other nodes may not see the folder, and lines of several writers would mix.
        self.log = MetricsLog(run.metrics if rank == 0 else os.devnull)
        self.sampler: Sampler | None = None
        self.meter: MemoryMeter | None = None
        # No limit until the worker is built, which may take hours, e.g. for features of a frozen backbone.
        self.watchdog = Watchdog(run.logs, rank, None)
        self.hung: Path | None = None

    def warn(self, message: str) -> None:
        logger.warning(message)
        self.log.event("warning", self.step, message=message)

    def note_checkpoint(self, folder: CheckpointFolder) -> None:
        # Logged at its own step: it is written in the background and completes when the loop is further.
        self.log.event("checkpoint", folder.step, checkpoint=folder.path.name)

    def records(self) -> list[Record]:
        """Return the log so far on worker 0, the only one that has it; an empty list on the others."""
        return read_metrics(self.run.metrics) if self.rank == 0 and self.run.metrics.exists() else []

    def end_requested(self) -> bool:
        """Return True on worker 0 if the driver asked for an end. The agreement before a step shares it."""
        self.watchdog.progress()
        return self.rank == 0 and self.run.end_requested()

    def stop_requested(self) -> bool:
        """Return True on worker 0 if the run has to stop, checked before each batch of an evaluation.

        A resize waits for the end of the evaluation, since an interrupted evaluation is not repeated.
        """
        self.watchdog.progress()
        return self.rank == 0 and self.run.stop_request.exists()

    def forget_peak(self) -> None:
        """Reset the memory peak, so that an evaluation or a checkpoint does not count as a step."""
        if self.meter is not None:
            self.meter.forget_peak()

    def close(self) -> None:
        """Stop sampler and watchdog, but not the log: the end of the run is still to be logged. May be called again."""
        if self.sampler is not None:
            self.sampler.close()
        self.watchdog.close()


@dataclass(frozen=True)
class _Taken:
    """A finished step; ``position`` is after it."""

    position: Position
    batches: list[PackedBatch]
    values: HostCopy
    lowest_scale: bool
    rate: float
    times: dict[str, float]


class StepResults:
    """Results of the steps of a run. ``late``: log a step later. Every worker makes the same calls in the same
    order."""

    def __init__(
        self,
        experiment: Experiment,
        engine: TrainingEngine,
        control: ControlGroup,
        observers: Observers,
        clock: StepClock,
        *,
        late: bool,
    ) -> None:
        self._experiment, self._engine, self._control = experiment, engine, control
        self._observers, self._clock = observers, clock
        self._kept_back = int(late)
        self._waiting: deque[_Taken] = deque()

    def add(
        self, position: Position, batches: list[PackedBatch], sums: MetricSums, result: StepResult, rate: float
    ) -> Position:
        """Add the step that led to this position. Returns the position updated with the results read so far."""
        values = HostCopy({**sums.own, _NORM: result.gradient_norm})
        self._waiting.append(_Taken(position, batches, values, result.lowest_scale, rate, self._clock.read()))
        return self.log_all(position, but=self._kept_back)

    def log_all(self, position: Position, but: int = 0) -> Position:
        """Log waiting steps except the last ``but``. Returns the position updated with the results read so far."""
        while len(self._waiting) > but:
            position = self._log_and_count(self._waiting.popleft(), position)
        return position

    def _log_and_count(self, taken: _Taken, position: Position) -> Position:
        own = taken.values.read()
        norm = float(own.pop(_NORM))
        skipped = not math.isfinite(norm)
        totals = self._control.sum(own)
        nonfinite = skipped and is_fault(self._experiment.settings.precision, taken.lowest_scale, totals)
        counts = {
            "skipped_steps": position.skipped_steps + int(skipped),
            "nonfinite_in_a_row": position.nonfinite_in_a_row + 1 if nonfinite else 0,
        }
        if nonfinite:
            self._save_records(taken.position.step - 1, taken.batches)
        self._log(taken, taken.position.model_copy(update=counts), totals, norm)
        return position.model_copy(update=counts)

    def _log(self, taken: _Taken, position: Position, totals: dict[str, Tensor], norm: float) -> None:
        log, skipped = self._observers.log, not math.isfinite(norm)
        metrics: dict[str, float] = self._engine.module.metrics(totals)  # type: ignore[operator]
        if self._observers.sampler is not None:
            loader = {
                "loader_queue_depth": self._experiment.batches.loader.queue_depth,
                "feature_cache_hit_rate": self._experiment.cache_hit_rate,
            }
            known = {name: float(value) for name, value in loader.items() if value is not None}
            self._observers.sampler.note(position.step, position.epoch, {**metrics, **taken.times, **known})
        log.write(
            "train",
            position.step,
            epoch=position.epoch,
            **metrics,
            learning_rate=taken.rate,
            gradient_norm=norm,
            skipped=skipped,
            skipped_steps=position.skipped_steps,
            tokens_seen=position.tokens_seen,
            **taken.times,
        )
        if skipped:
            log.event("nonfinite" if position.nonfinite_in_a_row else "loss_scale_lowered", position.step)

    def _save_records(self, step: int, batches: list[PackedBatch]) -> None:
        """Write the records of this worker's part of a step that was not finite."""
        folder, rank, name_of = self._observers.run.nonfinite, self._observers.rank, self._experiment.store.id
        # A worker without records left takes part in a step without a batch.
        records = torch.cat([batch.records for batch in batches]).tolist() if batches else []
        content = {"step": step, "rank": rank, "records": [{"index": i, "id": name_of(i)} for i in records]}
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"step-{step:08d}-rank-{rank:05d}.json", json.dumps(content, indent=1) + "\n")


def is_fault(precision: str, lowest_scale: bool, totals: Mapping[str, Tensor]) -> bool:
    """Test whether a skipped step is a fault. With fp16, a step that only lowers the loss scale is not."""
    return precision != "fp16" or lowest_scale or not math.isfinite(float(totals["loss"]))
