"""One optimizer step: forward and backward over its micro-batches, then the update.

In: the batches of a step, the engine, the clock that times them. Out: gradients in the engine, sums of metrics, and
what became of the update. The training loop and the measuring of throughput take their steps here alike.
"""

from __future__ import annotations

from dataset.steps import StepBatches
from training.collective import ControlGroup
from training.engine import StepResult, TrainingEngine
from training.metric_sums import MetricSums
from training.step_clock import StepClock


class Stepper:
    """Forward and backward of one optimizer step over its micro-batches.

    Args:
        engine: the model and its optimizer.
        control: the workers.
        clock: times the phases.
    """

    def __init__(self, engine: TrainingEngine, control: ControlGroup, clock: StepClock) -> None:
        self._engine, self._control, self._clock = engine, control, clock

    def forward_backward(self, step: StepBatches, global_targets: int) -> MetricSums:
        """Accumulate the gradients of a step. Every worker calls it.

        Args:
            step: this worker's batches.
            global_targets: targets of the whole step over all workers.

        Returns:
            This worker's sums of metrics.
        """
        sums = MetricSums()
        for batch in step:
            with self._clock.phase("forward"):
                output = self._engine(batch.to(self._engine.device, non_blocking=True))
            with self._clock.phase("backward"):
                self._engine.backward(output.loss_sum, global_targets)
            sums.add(output.metrics)
        return sums

    def update(self, learning_rate: float) -> StepResult:
        """Update the parameters and clear the gradients. Every worker calls it."""
        with self._clock.phase("optimizer"):
            return self._engine.step(learning_rate)
