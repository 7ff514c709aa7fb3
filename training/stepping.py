"""One optimizer step: forward and backward over its micro-batches, then the update.

In: the batches of a step, the engine, the clock that times them. Out: gradients in the engine, sums of metrics, and
what became of the update. The training loop and the measuring of throughput take their steps here alike.

With a memory guard a batch that does not fit is taken in parts. Running out in a forward pass is told to all workers
before anyone begins the backward pass, in which they wait for each other; then all split this batch and those to come.
In a backward pass a single worker forgets the step's gradients and takes it again; of several, the others wait in a
collective by then, so the attempt ends and the launcher starts again from the last checkpoint. The same goes for
ZeRO-3, whose forward passes are collective too.
"""

from __future__ import annotations

from typing import Any

from dataset.packed_batch import PackedBatch
from dataset.steps import StepBatches
from training.collective import ControlGroup
from training.engine import StepResult, TrainingEngine
from training.memory_guard import MemoryGuard, parts_of
from training.memory_meter import is_out_of_memory
from training.metric_sums import MetricSums
from training.step_clock import StepClock


class Stepper:
    """Forward and backward of one optimizer step over its micro-batches.

    Args:
        engine: the model and its optimizer.
        control: the workers.
        clock: times the phases.
        guard: takes batches in parts when memory runs out; without one, that is raised.
    """

    def __init__(
        self, engine: TrainingEngine, control: ControlGroup, clock: StepClock, guard: MemoryGuard | None = None
    ) -> None:
        self._engine, self._control, self._clock, self._guard = engine, control, clock, guard
        self._several = engine.world_size > 1
        engine.time_collectives(clock)

    def forward_backward(self, step: StepBatches, global_targets: int) -> MetricSums:
        """Accumulate the gradients of a step. Every worker calls it.

        Args:
            step: this worker's batches.
            global_targets: targets of the whole step over all workers.

        Returns:
            This worker's sums of metrics.

        Raises:
            ResourceError: memory ran out, also in the smallest parts.
            NewStartError: memory ran out where only a new start from the last checkpoint helps.
        """
        while True:
            sums = self._attempt(step, global_targets)
            if sums is not None:
                return sums
            # Here nothing of the broken pass is held any more, so that it can be freed.
            self._engine.discard_gradients()
            assert self._guard is not None
            self._guard.halve("memory ran out in a backward pass")

    def update(self, learning_rate: float) -> StepResult:
        """Update the parameters and clear the gradients. Every worker calls it."""
        with self._clock.phase("optimizer"):
            return self._engine.step(learning_rate)

    def _attempt(self, step: StepBatches, global_targets: int) -> MetricSums | None:
        """The sums of metrics; None where memory ran out in a backward pass and the step is to be taken again."""
        sums = MetricSums()
        for batch in step:
            pending = self._split(batch, self._guard.parts if self._guard is not None else 1)
            while pending:
                output = self._forward(pending[0])
                if self._ran_out(output is None, pending[0]):
                    output = None
                    assert self._guard is not None
                    self._guard.halve("memory ran out in a forward pass")
                    pending = [half for piece in pending for half in self._split(piece, 2)]
                    continue
                if not self._backward(output, global_targets, pending[0]):
                    return None
                sums.add(output.metrics)
                del pending[0]
        return sums

    def _split(self, batch: PackedBatch, parts: int) -> list[PackedBatch]:
        return [batch] if parts == 1 else parts_of(batch, parts, equally_many=self._several)

    def _forward(self, batch: PackedBatch) -> Any:
        """What the model makes of a batch; None where memory ran out."""
        try:
            with self._clock.phase("forward"):
                output = self._engine(batch.to(self._engine.device, non_blocking=True))
                if self._guard is not None:
                    self._guard.meter.check()
                return output
        except (RuntimeError, MemoryError) as error:
            if self._guard is None or not is_out_of_memory(error):
                raise
            if self._engine.stage == 3:
                raise self._guard.start_anew("memory ran out in a forward pass under ZeRO-3") from error
        return None

    def _backward(self, output: Any, global_targets: int, batch: PackedBatch) -> bool:
        """Whether memory was enough."""
        try:
            with self._clock.phase("backward"):
                self._engine.backward(output.loss_sum, global_targets)
            return True
        except (RuntimeError, MemoryError) as error:
            if self._guard is None or not is_out_of_memory(error):
                raise
            if batch.num_sequences == 1:
                raise self._guard.refuse_to_split(batch.num_tokens) from error
            if not self._engine.can_discard:
                raise self._guard.start_anew("memory ran out in a backward pass") from error
        return False

    def _ran_out(self, here: bool, batch: PackedBatch) -> bool:
        """Whether memory ran out on some worker.

        Raises:
            ResourceError: it did on a single sequence. On every worker.
        """
        if self._guard is None:
            return False
        tokens = batch.num_tokens if here and batch.num_sequences == 1 else 0
        if self._several and self._engine.stage < 3:
            with self._clock.phase("communication"):
                here, tokens = self._control.ran_out(here, tokens)
        if tokens:
            raise self._guard.refuse_to_split(tokens)
        return here
