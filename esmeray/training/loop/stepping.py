"""One optimizer step: forward and backward over its micro-batches, in training and in trials.

In: the batches of a step, the engine, the clock that times them. Out: gradients in the engine, and sums of metrics.
Where the loss is one of all sequences of a step, their vectors are computed first, without gradients.

With a memory guard a step in which memory runs out is repeated, with every batch in parts. Several workers have to
know of it before one of them waits in a collective for one that is not coming. So they agree right before the first
collective that follows a forward pass, where they would wait for each other anyway: under ZeRO-2 in the backward pass,
when the first gradients are to be added up, without ZeRO and under ZeRO-1 at the end of the step's passes. Where memory
runs out later in that backward pass, or under ZeRO-3, whose forward passes are collective too, the attempt ends and the
launcher starts again from the last checkpoint.
"""

from collections.abc import Callable, Iterator
from itertools import count

import torch
from torch import Tensor

from esmeray.cluster.collective import ControlGroup, MetricSums
from esmeray.common.errors import DataError
from esmeray.dataset.batches.steps import StepBatches, TrainingSteps
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.model.device import is_out_of_memory, seed_draws
from esmeray.model.task_model import StepModel
from esmeray.run_folder.checkpoints import Position
from esmeray.training.engine.engine import TrainingEngine
from esmeray.training.engine.memory_guard import MemoryGuard
from esmeray.training.engine.step_clock import StepClock


def every_step(batches: TrainingSteps, position: Position) -> Iterator[StepBatches]:
    """Every step from this position on, epoch after epoch; DataError where an epoch has none."""
    start, first_step = position.step_in_epoch, position.step - position.step_in_epoch
    for epoch in count(position.epoch):
        taken = start
        for step in batches.epoch(epoch, start, first_step):
            taken += 1
            yield step
        start, first_step = 0, first_step + taken
        if taken == 0:
            raise DataError("there is no record to train on: all are held out by data.validation_share")


class Stepper:
    """Forward and backward of a step; with a ``guard``, batches are taken in parts when memory runs out.

    ``progress`` is called after each of them.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        control: ControlGroup,
        clock: StepClock,
        guard: MemoryGuard | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine, self._control, self._clock, self._guard = engine, control, clock, guard
        self._progress = progress
        self._copies = BatchCopies(engine.device)
        self._several = engine.world_size > 1
        self._agrees = guard is not None and self._several and engine.can_discard
        self._agreement_due = False
        engine.time_collectives(clock, before=self._before_collective)

    def forward_backward(self, step: StepBatches, global_targets: int) -> MetricSums:
        """Accumulate the gradients of a step; returns this worker's sums of metrics. Every worker calls it.

        Raises ResourceError where memory runs out also in the smallest parts, or NewStartError.
        """
        while True:
            sums = self._attempt(step, global_targets)
            if sums is not None:
                return sums
            # After the attempt has returned: nothing of the broken pass is held any more, so that it can be freed.
            self._engine.discard_gradients()
            assert self._guard is not None
            self._guard.halve("out of memory")

    def _attempt(self, step: StepBatches, global_targets: int) -> MetricSums | None:
        """The sums of metrics; None where some worker is out of memory and all repeat the step."""
        sums = MetricSums()
        for batch, seed in zip(self._related(step), step.seeds, strict=True):
            # What a model draws depends on the batch: not on the worker, nor on what was drawn before.
            seed_draws(self._engine.device, seed)
            for piece in self._parts(batch):
                metrics = self._take(piece, global_targets)
                if metrics is None:
                    return None
                sums.add(metrics)
                self._progress()
        # Without a collective in the backward passes nobody was asked yet, and the update is about to have one.
        with self._clock.phase("communication"):
            return None if self._ran_out() else sums

    @torch.no_grad()
    def _related(self, step: StepBatches) -> list[PackedBatch]:
        """The batches, and what each has to know of the others where the loss is one of the whole step."""
        model = self._engine.module
        parts = 1 if self._guard is None else self._guard.parts
        # A step of one batch needs one pass: the model relates a batch to itself alone.
        if not isinstance(model, StepModel) or not (self._several or len(step) * parts > 1):
            return step.batches
        vectors: list[Tensor] = []
        with self._clock.phase("forward"):
            for batch, seed in zip(step, step.seeds, strict=True):
                # What is drawn here, a dropout say, is drawn alike in the pass that has gradients.
                seed_draws(self._engine.device, seed)
                # No fillers, which collectives of a backward pass alone would need; without gradients to keep it needs
                # less memory than the same piece will.
                vectors.append(torch.cat([model.vectors(self._copies.copy(piece)) for piece in batch.pieces(parts)]))
                self._progress()
        with self._clock.phase("communication"):
            return model.related(step.batches, vectors, self._control.gather, self._control.rank)

    def _parts(self, batch: PackedBatch) -> list[PackedBatch]:
        if self._guard is None or self._guard.parts == 1:
            return [batch]
        pieces = batch.pieces(self._guard.parts)
        # Equally many on every worker, those that count for nothing among them: others may wait in each pass.
        if self._several:
            pieces += [batch.without_targets()] * (self._guard.parts - len(pieces))
        return pieces

    def _take(self, batch: PackedBatch, global_targets: int) -> dict[str, Tensor] | None:
        """The metrics of a forward and a backward pass; None where some worker is out of memory and all know."""
        # One agreement a pass, at its first collective: workers wait for each other there in any case.
        self._agreement_due = self._agrees
        try:
            with self._clock.phase("forward"):
                output = self._engine(self._copies.copy(batch))
                if self._guard is not None:
                    # After the forward pass, when activations are all held: on the CPU no allocation fails by itself.
                    self._guard.meter.check()
            with self._clock.phase("backward"):
                self._engine.backward(output.loss_sum, global_targets)
            return output.metrics
        except _BrokenOffError:
            return None
        except (RuntimeError, MemoryError) as error:
            if self._guard is None or not is_out_of_memory(error):
                raise
            # A single sequence can't be split further.
            too_long = batch.num_tokens if batch.num_sequences == 1 else 0
            # Gradients can't be taken back, or others wait already in a collective that this worker will not reach.
            if not self._engine.can_discard or (self._agrees and not self._agreement_due):
                if too_long:
                    raise self._guard.refuse_to_split(too_long) from error
                raise self._guard.start_anew("out of memory while workers wait for each other") from error
        # Outside the handler, whose error holds the tensors of the pass.
        with self._clock.phase("communication"):
            self._ran_out(here=True, too_long=too_long)
        return None

    def _before_collective(self) -> None:
        """Abort the backward pass before anyone waits in it for a worker that is out of memory."""
        if self._agreement_due:
            with self._clock.collective():
                ran_out = self._ran_out()
            if ran_out:
                raise _BrokenOffError

    def _ran_out(self, here: bool = False, too_long: int = 0) -> bool:
        """Test for out of memory on some worker, this one included; the others are asked once after a forward pass.

        ``too_long``: tokens of the single sequence that was out of memory; then every worker raises ResourceError.
        """
        if self._agreement_due:
            self._agreement_due = False
            here, too_long = self._control.ran_out(here, too_long)
        if too_long:
            assert self._guard is not None
            raise self._guard.refuse_to_split(too_long)
        return here


class _BrokenOffError(Exception):
    """Another worker was out of memory."""


class BatchCopies:
    """Copies of batches to a device, on CUDA on a stream of their own, beside what is still done for those before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, batch: PackedBatch) -> PackedBatch:
        """The batch on the device; where its memory is pinned, the host does not wait."""
        if self._stream is None:
            return batch.to(self._device)
        with torch.cuda.stream(self._stream):
            copied = batch.to(self._device, non_blocking=True)
        reader = torch.cuda.current_stream(self._device)
        reader.wait_stream(self._stream)
        # Or the memory that the copying stream made could be used again before this one is through with it.
        copied.map(lambda tensor: tensor.record_stream(reader))
        return copied
