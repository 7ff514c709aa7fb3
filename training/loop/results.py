"""What each step came to: its metrics, its gradient norm and whether its update was left out, logged and counted.

On a GPU they are read a step later, when the device is long through with them, so that it never waits for the host.
"""

import json
import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from esmeray.common.publishing import write_atomically
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.model.device import HostCopy
from esmeray.run_folder.checkpoints import Position
from esmeray.training.engine.collective import ControlGroup, MetricSums
from esmeray.training.engine.engine import StepResult, TrainingEngine
from esmeray.training.engine.step_clock import StepClock
from esmeray.training.loop.observers import Observers
from esmeray.training.tasks.experiment import Experiment

_NORM = "gradient norm"


@dataclass(frozen=True)
class _Taken:
    """A step, ``position`` after it; ``times`` where it is to be logged."""

    position: Position
    batches: list[PackedBatch]
    values: HostCopy
    lowest_scale: bool
    rate: float
    times: dict[str, float] | None


class StepResults:
    """Results of the steps of a run. ``late``: logged a step later. Every worker calls the same methods in turn."""

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
        """Note the step that led to this position; returns the position with what is known by now."""
        values = HostCopy({**sums.own, _NORM: result.gradient_norm})
        times = self._clock.read() if self._clock.log_due(position.step - 1) else None
        self._waiting.append(_Taken(position, batches, values, result.lowest_scale, rate, times))
        return self._log_all_but(self._kept_back, position)

    def log_all(self, position: Position) -> Position:
        return self._log_all_but(0, position)

    def _log_all_but(self, count: int, position: Position) -> Position:
        while len(self._waiting) > count:
            position = self._log_and_count(self._waiting.popleft(), position)
        return position

    def _log_and_count(self, taken: _Taken, position: Position) -> Position:
        own = taken.values.read()
        norm = float(own.pop(_NORM))
        skipped = not math.isfinite(norm)
        # The norm is the same on all workers, so that all of them add up, or none does.
        totals = self._control.sum(own) if skipped or taken.times is not None else {}
        nonfinite = skipped and self._is_fault(taken, totals)
        counts = {
            "skipped_steps": position.skipped_steps + int(skipped),
            "nonfinite_in_a_row": position.nonfinite_in_a_row + 1 if nonfinite else 0,
        }
        if nonfinite:
            self._save_records(taken.position.step - 1, taken.batches)
        if totals:
            self._log(taken, taken.position.model_copy(update=counts), totals, norm)
        return position.model_copy(update=counts)

    def _is_fault(self, taken: _Taken, totals: dict[str, Tensor]) -> bool:
        """Test for a skipped step that is a fault; with fp16, one that only lowers the loss scale is none."""
        if self._experiment.training.precision != "fp16" or taken.lowest_scale:
            return True
        return not math.isfinite(float(totals["loss"]))

    def _log(self, taken: _Taken, position: Position, totals: dict[str, Tensor], norm: float) -> None:
        log, skipped = self._observers.log, not math.isfinite(norm)
        # A step that was skipped is logged although it was not due: the clock is read for it now.
        times = taken.times or self._clock.read()
        metrics: dict[str, float] = self._engine.module.metrics(totals)  # type: ignore[operator]
        if self._observers.sampler is not None:
            loader = {
                "loader_queue_depth": self._experiment.batches.queue_depth,
                "feature_cache_hit_rate": self._experiment.cache_hit_rate,
            }
            known = {name: float(value) for name, value in loader.items() if value is not None}
            self._observers.sampler.note(position.step, position.epoch, {**metrics, **times, **known})
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
            **times,
        )
        if skipped:
            log.event("nonfinite" if position.nonfinite_in_a_row else "loss_scale_lowered", position.step)

    def _save_records(self, step: int, batches: list[PackedBatch]) -> None:
        """Write the records of this worker's part of a step that was not finite."""
        folder, rank, name_of = self._observers.run.nonfinite, self._observers.rank, self._experiment.store.id
        # A worker that had run out of records took part without a batch.
        records = torch.cat([batch.records for batch in batches]).tolist() if batches else []
        content = {"step": step, "rank": rank, "records": [{"index": i, "id": name_of(i)} for i in records]}
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"step-{step:08d}-rank-{rank:05d}.json", json.dumps(content, indent=1) + "\n")
