"""One optimizer step: forward and backward passes over its micro-batches, in training and in trials.

Takes the batches of a step, accumulates gradients in the engine and returns sums of metrics. If the loss relates all
sequences of a step, their vectors are computed first, without gradients.

With a memory guard, a step that runs out of memory is repeated with every batch split. With several workers, all must
know of it before one of them waits in a collective that another will not join. Therefore they agree right before the
first collective after a forward pass, where they wait for each other anyway:

- Under ZeRO-2 this is in the backward pass, when the first gradients are added up.
- Without ZeRO and under ZeRO-1 it is at the end of the step's passes.

If memory runs out later in that backward pass, the attempt ends and the launcher restarts from the last checkpoint. The
same applies under ZeRO-3, where forward passes are collective too.
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
from esmeray.training.engine.memory_guard import MemoryGuard, refuse_to_split
from esmeray.training.engine.step_clock import StepClock


def every_step(batches: TrainingSteps, position: Position) -> Iterator[StepBatches]:
    """Yield every step from this position on, epoch after epoch. Raises DataError if an epoch has no step."""
    start, first_step = position.step_in_epoch, position.step - position.step_in_epoch
    for epoch in count(position.epoch):
        taken = start
        for step in batches.epoch(epoch, start, first_step):
            taken += 1
            yield step
        start, first_step = 0, first_step + taken
        if taken == 0:
            raise DataError("no training records: all are held out by data.validation_share")


class Stepper:
    """Forward and backward of a step. With a ``guard``, batches are split if memory runs out.

    ``progress`` is called after each micro-batch.
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
        """Accumulate the gradients of a step. Returns this worker's sums of metrics. Every worker calls it.

        Raises ResourceError if memory runs out even with the smallest parts, or NewStartError.
        """
        while True:
            try:
                return self._passes(step, global_targets)
            except _OutOfMemoryError:
                pass
            # After the except block no reference to the failed attempt's tensors remains, so that they can be freed.
            self._engine.discard_gradients()
            assert self._guard is not None
            self._guard.halve("out of memory")

    def _passes(self, step: StepBatches, global_targets: int) -> MetricSums:
        """Run all passes of a step. Raises _OutOfMemoryError on every worker if one of them is out of memory."""
        sums = MetricSums()
        for batch, seed in zip(self._related(step), step.seeds, strict=True):
            # Random numbers of a model depend on the batch only, not on the worker or on earlier draws.
            seed_draws(self._engine.device, seed)
            for piece in self._parts(batch):
                sums.add(self._forward_backward(piece, global_targets))
                self._progress()
        # Without a collective in the backward passes no agreement has happened yet, and the update contains one.
        with self._clock.phase("communication"):
            self._agree_on_memory()
        return sums

    @torch.no_grad()
    def _related(self, step: StepBatches) -> list[PackedBatch]:
        """Return the batches; if the loss relates the whole step, with the information that each needs about the
        others."""
        model = self._engine.module
        parts = 1 if self._guard is None else self._guard.parts
        # A step of one batch needs a single pass: the model relates a batch to itself.
        if not isinstance(model, StepModel) or not (self._several or len(step) * parts > 1):
            return step.batches
        vectors: list[Tensor] = []
        with self._clock.phase("forward"):
            for batch, seed in zip(step, step.seeds, strict=True):
                # The same random numbers, e.g. of dropout, are drawn again in the pass with gradients.
                seed_draws(self._engine.device, seed)
                # No filler batches: only collectives of a backward pass need them. Without stored activations a piece
                # needs less memory here than in the pass with gradients.
                vectors.append(torch.cat([model.vectors(self._copies.copy(piece)) for piece in batch.pieces(parts)]))
                self._progress()
        with self._clock.phase("communication"):
            return model.related(step.batches, vectors, self._control.gather, self._control.rank)

    def _parts(self, batch: PackedBatch) -> list[PackedBatch]:
        if self._guard is None or self._guard.parts == 1:
            return [batch]
        pieces = batch.pieces(self._guard.parts)
        # Every worker needs the same number of passes, as others may wait in each: add fillers without targets.
        if self._several:
            pieces += [batch.without_targets()] * (self._guard.parts - len(pieces))
        return pieces

    def _forward_backward(self, batch: PackedBatch, global_targets: int) -> dict[str, Tensor]:
        """Run a forward and a backward pass and return the metrics."""
        # One agreement per pass, at its first collective, where the workers wait for each other anyway.
        self._agreement_due = self._agrees
        try:
            with self._clock.phase("forward"):
                output = self._engine(self._copies.copy(batch))
                if self._guard is not None:
                    # After the forward pass, when all activations are in memory: on the CPU no allocation fails by
                    # itself.
                    self._guard.meter.check()
            with self._clock.phase("backward"):
                self._engine.backward(output.loss_sum, global_targets)
            return output.metrics
        except (RuntimeError, MemoryError) as error:
            if self._guard is None or not is_out_of_memory(error):
                raise
            # A single sequence can't be split further.
            too_long = batch.num_tokens if batch.num_sequences == 1 else 0
            # Either gradients can't be discarded, or other workers already wait in a collective that this one will not
            # reach.
            if not self._engine.can_discard or (self._agrees and not self._agreement_due):
                if too_long:
                    raise refuse_to_split(too_long) from error
                raise self._guard.start_anew("out of memory while workers wait for each other") from error
        # Outside the except block: the error references the tensors of the pass.
        with self._clock.phase("communication"):
            self._agree_on_memory(out_of_memory=True, too_long=too_long)
        raise _OutOfMemoryError

    def _before_collective(self) -> None:
        """Abort the backward pass before a worker waits in it for one that is out of memory."""
        if self._agreement_due:
            with self._clock.collective():
                self._agree_on_memory()

    def _agree_on_memory(self, out_of_memory: bool = False, too_long: int = 0) -> None:
        """Raise _OutOfMemoryError if any worker is out of memory. The workers agree on it once per forward pass.

        ``too_long``: number of tokens of a single sequence that is too large for the memory; then every worker raises
        ResourceError.
        """
        if self._agreement_due:
            self._agreement_due = False
            out_of_memory, too_long = self._control.any_out_of_memory(out_of_memory, too_long)
        if too_long:
            raise refuse_to_split(too_long)
        if out_of_memory:
            raise _OutOfMemoryError


class _OutOfMemoryError(Exception):
    """Raised on every worker if one of them is out of memory: all repeat the step with smaller parts."""


class BatchCopies:
    """Copy batches to a device. On CUDA a separate stream overlaps the copy with the computation of earlier batches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, batch: PackedBatch) -> PackedBatch:
        """Return the batch on the device. If its memory is pinned, the host does not wait."""
        if self._stream is None:
            return batch.to(self._device)
        with torch.cuda.stream(self._stream):
            copied = batch.to(self._device, non_blocking=True)
        reader = torch.cuda.current_stream(self._device)
        reader.wait_stream(self._stream)
        # Otherwise memory allocated on the copy stream could be reused before this stream has finished reading it.
        copied.map(lambda tensor: tensor.record_stream(reader))
        return copied
